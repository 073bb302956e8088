"""Stands in front of the real package, so that the row without it can be measured where it is installed."""

raise ImportError("hidden by the benchmark")

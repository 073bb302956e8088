"""Checks whether a command would start, without running it."""

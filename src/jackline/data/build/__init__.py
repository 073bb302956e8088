"""Builds the cache: the builder process, its decisions, and waiting for it."""

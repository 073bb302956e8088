"""Building the cache: the process, its decisions, and waiting for it."""

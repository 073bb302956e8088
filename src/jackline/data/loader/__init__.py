"""Batches of windows in a shuffled, seekable order."""

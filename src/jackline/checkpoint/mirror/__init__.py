"""Copies of checkpoints in a second place, and fetching them back. Torch-free."""

"""Copies of checkpoints in a second place, and back from there. Torch-free."""

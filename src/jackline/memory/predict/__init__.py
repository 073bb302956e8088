"""Predicts the memory of a training step without a GPU."""

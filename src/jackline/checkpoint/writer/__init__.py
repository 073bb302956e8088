"""The process that writes checkpoints. Torch-free."""

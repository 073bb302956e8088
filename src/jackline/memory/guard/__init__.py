"""Protection during training: smaller micro-batches, a save before the kernel kills."""

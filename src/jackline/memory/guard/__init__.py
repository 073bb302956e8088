"""Protection during training: smaller micro-batches, and a save before the kernel's OOM killer acts."""

"""What the trainer says: console, step lines, curves, statistics."""

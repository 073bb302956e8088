"""Turning live objects into tensors and plain values, and restoring those into live objects."""

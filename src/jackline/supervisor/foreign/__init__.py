"""Checkpoints that a user's own script writes: which exist, which are whole, their mirror."""

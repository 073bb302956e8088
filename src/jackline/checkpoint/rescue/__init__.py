"""The state of a training that never asked for a checkpoint: what is alive in its process, and saving it."""

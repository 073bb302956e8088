"""From live tensors to the memory shared with the writer, and the hand-over to it."""

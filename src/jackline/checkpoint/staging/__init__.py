"""Copying live tensors into the memory shared with the writer, and handing the save over to it."""

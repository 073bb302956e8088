"""The live view of a run in a terminal, a notebook cell or a pipe."""

"""One attempt of a run: watch it, stop it, and find out why it ended."""

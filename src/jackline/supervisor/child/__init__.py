"""The user's command as a process tree: its keeper, its environment."""

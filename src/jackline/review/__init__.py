"""What a run did, read from its folder: attempts, time, curves, differences. For commands, pages and notebooks."""

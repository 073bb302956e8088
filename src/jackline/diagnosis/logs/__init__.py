"""What log files and curves tell about a run."""

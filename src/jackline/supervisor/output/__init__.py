"""The command's output: raw bytes become lines in out.log and progress, and their disk space is freed again."""

"""The command's output: from raw bytes to out.log, progress and free disk."""

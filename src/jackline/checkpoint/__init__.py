"""Checkpoints: format, verify, commit, retention, schedule, writer, mirror (torch-free); capture, stage, restore."""

"""The command line: one file per command; texts for people are in `text`."""

"""The command line: one file a command, text for people in `text`."""

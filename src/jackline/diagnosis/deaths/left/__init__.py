"""What an ended process left behind beside its words: its note, and what its error names, measured at once."""

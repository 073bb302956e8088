"""Would this command start? Checked without running it."""

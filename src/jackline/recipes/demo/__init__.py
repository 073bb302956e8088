"""Demo: a small GPT on the sources of the Python standard library."""

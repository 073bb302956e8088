"""The built-in trainer: one loop, read top to bottom, and the recipes it runs."""

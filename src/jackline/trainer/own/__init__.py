"""A recipe of one's own in one file: its settings class, its batches, and what a step of it is."""

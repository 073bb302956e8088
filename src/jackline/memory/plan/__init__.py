"""Which micro-batch fits on which GPU, in numbers and words."""

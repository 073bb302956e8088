"""Where batches come from, and how to return to batch k of epoch e."""

"""The trained model in hand: loaded, sampled from, and exported for other libraries."""

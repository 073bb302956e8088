"""From live objects to tensors and plain values, and back into them."""

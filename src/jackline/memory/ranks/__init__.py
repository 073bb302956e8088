"""What several GPUs change: weights that are kept whole, in shares or on the host, and what ranks send."""

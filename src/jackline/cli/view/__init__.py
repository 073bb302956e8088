"""What a person sees of a live run."""

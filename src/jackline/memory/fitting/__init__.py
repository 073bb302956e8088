"""What would fit: the smallest change of settings, and the largest training for given GPUs and hours."""

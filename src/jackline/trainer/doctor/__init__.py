"""The half of `jackline doctor RECIPE` that needs torch."""

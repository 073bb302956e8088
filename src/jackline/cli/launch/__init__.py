"""`jackline launch`: a ready file for a scheduler."""

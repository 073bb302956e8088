"""`jackline plot`: curves of one or several runs in the terminal."""

"""The code that runs inside the user's own process. `phase` is torch-free; the rest is not."""

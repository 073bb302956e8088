"""Commands for the trained model: sample from it, export it. Each starts a process that may import torch."""

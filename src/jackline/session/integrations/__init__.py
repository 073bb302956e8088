"""Exact resume for loops that frameworks own. Each module needs its library; none is imported by anything else."""

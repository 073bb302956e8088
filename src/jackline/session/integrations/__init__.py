"""Exact resume for loops that others own. Each module needs its library; none is imported by anything else."""

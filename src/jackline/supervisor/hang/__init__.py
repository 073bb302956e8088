"""Hang detection: what moved in the process tree, the verdict from it, and the incident file."""

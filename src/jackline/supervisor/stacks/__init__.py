"""Stacks: where every thread of every process is in its code."""

"""Typed records of a run directory."""

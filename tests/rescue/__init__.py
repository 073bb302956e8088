"""Rescue: the state of scripts that never saved."""

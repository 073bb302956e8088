"""Sentences of the commands. No effects."""

"""Alarms for numbers that cannot be right."""

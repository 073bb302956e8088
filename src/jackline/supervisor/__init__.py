"""Starts a command, watches it, names its hangs, explains its death, starts it again.

Torch-free. Decisions (verdict, policy) are pure functions; supervise.py is the thin loop that feeds them.
"""

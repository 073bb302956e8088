"""Starts a command, watches it, detects hangs, explains why it ended, and restarts it.

Does not import torch. Decisions (verdict, policy) are pure functions; supervise.py is the thin loop that feeds them.
"""

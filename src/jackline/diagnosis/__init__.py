"""Turns evidence into text: what a live run is doing, and why an ended one ended.

Pure functions over plain data; works without torch, after the run has ended, and on a copied run directory.
"""

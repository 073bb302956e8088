"""From evidence to words: what a live run is doing and why a dead one died.

Pure functions over plain data; works on a copied run directory, without torch, after death.
"""

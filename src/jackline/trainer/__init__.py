"""The built-in trainer: one loop, read top to bottom, and the recipes it runs.

No torch here and in `recipes/__init__`: the command line asks them which recipes there are.
"""

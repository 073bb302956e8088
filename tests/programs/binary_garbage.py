"""Bytes that were never meant for a terminal: every value, NULs, half escape sequences."""
# expect: exit=0 cause=finished out="after the garbage"

import os
import random

garbage = random.Random(0).randbytes(300_000) + bytes(range(256)) * 100 + b"\x1b[\x00\x1b]0;"
while garbage:
    garbage = garbage[os.write(1, garbage) :]
os.write(1, b"\nafter the garbage\n")

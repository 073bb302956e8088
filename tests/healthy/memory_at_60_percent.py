"""Loads its data until 60 % of the memory limit and stays there: no reason for a warning."""
# expect: memory_limit=700M

import time

parts = []
for _ in range(35):
    parts.append(bytearray(b"x") * (10 << 20))
    time.sleep(0.15)
for step in range(6):
    time.sleep(1.5)
    print("step", step, flush=True)

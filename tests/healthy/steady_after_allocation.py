"""Half a gigabyte within a moment, then steady work: a jump is not a trend."""
# expect: memory_limit=1000M

import time

table = bytearray(b"x") * (500 << 20)
for step in range(7):
    end = time.monotonic() + 1
    while time.monotonic() < end:
        table[step] = sum(range(1000)) % 251
        time.sleep(0.002)
    time.sleep(1)
print("done")

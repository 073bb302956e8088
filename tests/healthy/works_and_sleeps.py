"""0.3 s of work for every 3 s of sleep: slow steps, silent, but alive."""

import time

for _ in range(5):
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        sum(range(1000))
    time.sleep(3)
print("done")

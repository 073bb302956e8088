"""Saves checkpoints with fsync: the main thread spends its time in the disk."""

import os
import time

block = os.urandom(1 << 20)
end = time.monotonic() + 14
number = 0
while time.monotonic() < end:
    with open("checkpoint.tmp", "wb") as file:
        for _ in range(24):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    os.replace("checkpoint.tmp", "checkpoint.bin")
    number += 1
    time.sleep(0.3)
print("saved", number, "checkpoints")

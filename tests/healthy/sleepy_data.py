"""Each batch comes after three seconds of waiting; nothing is printed before the end of the epoch."""

import time

total = 0
for batch in range(6):
    time.sleep(2.5)
    total += sum(i * i for i in range(400_000))
print("epoch done", total)

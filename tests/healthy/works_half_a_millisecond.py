"""A millisecond of work each 100 ms, silent."""

# expect: slow=yes
import time

for i in range(140):
    time.sleep(0.1)
    sum(range(30_000))

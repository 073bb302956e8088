"""A list of strings grows until the kernel kills it."""

# expect: slow=yes cause=kernel_oom signal=9 memory_limit=300M
import time

seen = []


def remember(i):
    seen.append("x" * (4 << 20) + str(i))  # HERE


i = 0
while True:
    remember(i)
    i += 1
    time.sleep(0.05)

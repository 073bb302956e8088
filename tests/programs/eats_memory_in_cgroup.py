"""Grows by 200 MB a second inside a memory cgroup until the kernel ends it."""
# expect: cause=kernel_oom signal=9 event=memory marker=HERE memory_limit=900M

import time

cache = []
print("caching the data set")
while True:
    cache.append((bytearray(b"x") * (10 << 20), time.sleep(0.05)))  # HERE

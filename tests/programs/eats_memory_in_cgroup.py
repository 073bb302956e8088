"""Grows by 200 MB a second inside a memory cgroup until the kernel ends it."""
# expect: cause=kernel_oom signal=9 event=memory marker=HERE memory_limit=900M

import time

cache = []


def load_shard() -> bytearray:
    shard = bytearray(10 << 20)
    shard[::4096] = b"x" * len(shard[::4096])  # touched, or the kernel would not count it
    return shard


start = time.monotonic()
print("caching the data set")
while True:
    cache.append(load_shard())  # HERE
    time.sleep(max(0.0, start + len(cache) * 0.05 - time.monotonic()))

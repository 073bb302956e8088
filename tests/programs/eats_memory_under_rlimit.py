"""Where no cgroup can be made: a list grows until RLIMIT_AS says no, and Python says MemoryError."""
# expect: cause=host_memory_error exit=1 marker=HERE

import resource

resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
cache = []
print("caching the data set")
while True:
    cache.append(bytearray(20 << 20))  # HERE

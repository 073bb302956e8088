"""Another process holds the lock of the cache and never lets go."""
# expect: verdict=STUCK label=STUCK_LOCK marker=HERE

import fcntl
import os
import signal

ready, done = os.pipe()
if os.fork() == 0:
    with open("cache.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(done, b"x")
        signal.pause()
os.read(ready, 1)
with open("cache.lock", "w") as file:
    print("waiting for the cache")
    fcntl.flock(file, fcntl.LOCK_EX)  # HERE

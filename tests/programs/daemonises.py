"""Leaves a daemon behind (double fork, own session) and ends."""
# expect: do=stop cause=stopped|finished

import os
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open("daemon.pid", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(10_000)
    os._exit(0)
os.wait()
while not (os.path.exists("daemon.pid") and os.path.getsize("daemon.pid")):
    time.sleep(0.01)
print("started the metrics daemon")

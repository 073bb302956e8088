"""Somebody else's kill -9: no memory pressure, no line in the kernel log."""
# expect: cause=killed_by_someone signal=9

import os
import subprocess
import time

print("training")
subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -9 {os.getpid()}"])
while True:
    time.sleep(0.1)
    print("step")

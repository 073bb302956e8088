"""SIGTERM from outside, the way a scheduler takes a machine back."""
# expect: cause=preempted signal=15

import os
import subprocess
import time

print("training")
subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -TERM {os.getpid()}"])
while True:
    time.sleep(0.1)
    print("step")

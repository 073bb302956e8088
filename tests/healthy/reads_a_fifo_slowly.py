"""Another program writes one byte a second into a named pipe; the main thread reads and keeps quiet."""

import os
import subprocess

os.mkfifo("feed")
subprocess.Popen(["sh", "-c", "for i in $(seq 18); do printf x; sleep 1; done > feed"])
count = 0
with open("feed", "rb", buffering=0) as feed:
    while feed.read(1):
        count += 1
print(count, "bytes")

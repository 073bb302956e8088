"""Waits for a file that a child appends to each second."""

# expect: slow=yes
import os, subprocess, time

p = subprocess.Popen(["sh", "-c", "i=0; while [ $i -lt 14 ]; do sleep 1; echo x >> part; i=$((i+1)); done"])
while not os.path.exists("part") or os.path.getsize("part") < 28:
    time.sleep(0.25)
p.wait()

"""Polls a hung child each 0.2 s."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE
import subprocess, time

p = subprocess.Popen(["sleep", "10000"])
while p.poll() is None:
    time.sleep(0.2)  # HERE

"""A child program copies a file again and again; the parent only waits."""

import os
import subprocess

with open("corpus.bin", "wb") as file:
    for _ in range(32):
        file.write(os.urandom(1 << 20))
script = "end=$(($(date +%s) + 13)); while [ $(date +%s) -lt $end ]; do cp corpus.bin copy.bin; sync copy.bin; sleep 0.5; done"
subprocess.run(["sh", "-c", script], check=True)
print("copied")

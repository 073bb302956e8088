"""Compresses a large file in a child program while the parent waits for it."""

# expect: slow=yes
import subprocess
import sys
import time

with open("corpus.txt", "wb") as file:
    for number in range(200_000):
        file.write(b"%d the quick brown fox jumps over the lazy dog\n" % (number * 7919))
end = time.monotonic() + 13
while time.monotonic() < end:
    subprocess.run([sys.executable, "-m", "gzip", "--best", "corpus.txt"], check=True)
print("compressed")

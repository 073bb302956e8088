"""Waits for sort of a few million lines, twice."""

# expect: slow=yes
import subprocess, random

with open("n.txt", "w") as f:
    for i in range(1_500_000):
        f.write(f"{random.random()}\n")
for _ in range(2):
    subprocess.run("sort n.txt > s.txt; sort -R n.txt > t.txt", shell=True, check=True)

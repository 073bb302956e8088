"""A child `cat` without input file waits on a FIFO."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE
import os, subprocess

os.mkfifo("in")
subprocess.run(["cat", "in"], check=True)  # HERE

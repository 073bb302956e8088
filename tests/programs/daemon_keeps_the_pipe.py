"""A shell has ended, but what it left in the background holds the pipe that its parent reads to the end."""
# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE

import subprocess

subprocess.run("sleep 3600 & echo started", shell=True, capture_output=True)  # HERE
print("never")

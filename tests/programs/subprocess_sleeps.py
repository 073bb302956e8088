"""Waits for a child program that does nothing."""
# expect: verdict=STUCK label=STUCK_CHILD marker=HERE

import subprocess

print("exporting")
subprocess.run(["sleep", "10000"])  # HERE

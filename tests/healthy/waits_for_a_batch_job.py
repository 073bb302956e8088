"""Polls for the result of a child that is hard at work elsewhere in the tree."""

import os
import subprocess
import sys
import time

job = "import time\nend = time.monotonic() + 13\nwhile time.monotonic() < end: sum(range(10_000)), time.sleep(0.002)\nopen('result', 'w').close()"
child = subprocess.Popen([sys.executable, "-c", job])
while not os.path.exists("result"):
    time.sleep(1)
child.wait()
print("the job is done")

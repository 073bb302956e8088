"""A script that calls scripts: sh runs sh runs a worker, each waiting for the next."""

import subprocess
import sys

worker = "import time\nfor i in range(70):\n  time.sleep(0.2); sum(range(300_000))"
script = f"""sh -c 'sh -c "{sys.executable} worker.py; echo inner"; echo outer'"""
with open("worker.py", "w") as file:
    file.write(worker)
subprocess.run(["sh", "-c", script + "; echo done"], check=True)

"""A child that computes 20 ms every 4 s."""
# expect: slow=yes

import subprocess, sys

subprocess.run(
    [sys.executable, "-c", "import time\nfor _ in range(11):\n    time.sleep(4); sum(range(800_000))"], check=True
)

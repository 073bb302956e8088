"""A launcher ends with the returncode of its child, -9: the shell sees 247."""
# expect: cause=killed_by_someone exit=247 says="256 - 9"

import subprocess
import sys

child = subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
sys.exit(child.returncode)

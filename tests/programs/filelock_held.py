"""A cache is guarded by filelock, and a process that was forgotten holds the lock."""
# expect: slow=yes verdict=STUCK|SUSPECT label=STUCK_LOCK marker=HERE says="cache.lock"

import subprocess
import sys

from filelock import FileLock

HOLD = "import time, filelock; kept = filelock.FileLock('cache.lock').acquire(); print(flush=True); time.sleep(1e6)"
with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE) as holder:
    holder.stdout.readline()
    print("loading the data set from the cache")
    with FileLock("cache.lock"):  # HERE
        print("loaded")

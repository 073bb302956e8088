"""Does not listen to SIGTERM, so `jackline stop` has to insist."""
# expect: do=stop cause=stopped signal=9

import signal
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    time.sleep(0.2)
    print("step", flush=True)

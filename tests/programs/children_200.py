"""Two hundred children that never end."""
# expect: verdict=STUCK label=STUCK_CHILD marker=HERE

import os
import signal

for _ in range(200):
    if os.fork() == 0:
        signal.pause()
print("started 200 workers", flush=True)
os.wait()  # HERE

"""An event that nobody sets, beside a thread that wakes up each second and prints nothing."""
# expect: slow=yes verdict=STUCK label=STUCK_LOCK marker=HERE

import threading
import time

ready = threading.Event()
beats: list[float] = []


def beat() -> None:
    while True:
        time.sleep(1)
        beats.append(time.time())


threading.Thread(target=beat, daemon=True).start()
ready.wait()  # HERE

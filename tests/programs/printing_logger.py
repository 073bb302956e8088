"""The main thread is deadlocked while a thread continues printing lines without news: output is no proof of progress."""
# expect: verdict=SUSPECT|STUCK marker=HERE

import threading
import time


def print_heartbeat() -> None:
    while True:
        print("system: cpu 3 % ram 31 %", flush=True)
        time.sleep(0.5)


threading.Thread(target=print_heartbeat, name="monitor", daemon=True).start()
lock = threading.Lock()
lock.acquire()
lock.acquire()  # HERE

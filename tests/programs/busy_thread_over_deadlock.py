"""Deadlocked main thread over a thread that works: from outside this is a main thread that waits for its worker.
No alarm can be promised here, but the line must be shown."""
# expect: verdict=BUSY|SUSPECT marker=HERE watch_s=15

import threading


def compress_logs() -> None:
    while True:
        sum(range(1000))


threading.Thread(target=compress_logs, name="compressor", daemon=True).start()
print("training")
lock = threading.Lock()
lock.acquire()
lock.acquire()  # HERE

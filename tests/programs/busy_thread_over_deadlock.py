"""Deadlocked main thread beside a thread that works. From outside this looks like a main thread that waits for its
worker; read from inside, the main thread waits for a lock that it holds."""
# expect: verdict=STUCK label=DEADLOCK marker=HERE

import threading


def compress_logs() -> None:
    while True:
        sum(range(1000))


threading.Thread(target=compress_logs, name="compressor", daemon=True).start()
print("training")
lock = threading.Lock()
lock.acquire()
lock.acquire()  # HERE

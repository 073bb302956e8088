"""The data of the README's picture."""

import threading
import time

lock = threading.Lock()


def read_shards() -> None:
    print("reading shards")
    time.sleep(3)


def next_batch(hangs: bool) -> None:
    if hangs:
        lock.acquire()  # and no one releases it
    with lock:
        time.sleep(0.01)

"""The main thread waits for an event that a thread sets after a sleep longer than the limit."""
# expect: slow=yes

import threading
import time

ready = threading.Event()


def warm_up() -> None:
    time.sleep(10)
    ready.set()


threading.Thread(target=warm_up, daemon=True).start()
ready.wait()

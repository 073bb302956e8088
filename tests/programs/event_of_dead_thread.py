"""The thread that was to set the event died; its traceback scrolled by, the main thread waits."""
# expect: verdict=STUCK label=STUCK_LOCK marker=HERE out=ZeroDivisionError

import threading

is_loaded = threading.Event()


def load() -> None:
    1 / 0
    is_loaded.set()


threading.Thread(target=load).start()
is_loaded.wait()  # HERE

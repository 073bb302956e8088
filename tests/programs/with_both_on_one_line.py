"""with a, b: on one line against b, a; attributes of objects."""

# expect: slow=yes verdict=STUCK label=DEADLOCK marker=HERE
import threading, time


class Box:
    def __init__(self):
        self.lock = threading.RLock()


left, right = Box(), Box()
gate = threading.Barrier(2)


def slow(lock):
    gate.wait()
    return lock


def other():
    with right.lock, slow(left.lock):
        pass


threading.Thread(target=other, daemon=True).start()
with left.lock, slow(right.lock):  # HERE
    pass

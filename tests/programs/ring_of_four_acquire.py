"""Four threads, four locks, taken by acquire() in a ring."""

# expect: verdict=STUCK label=DEADLOCK says="they wait for each other"
import threading, time

locks = [threading.Lock() for _ in range(4)]
gate = threading.Barrier(4)


def stage(i):
    locks[i].acquire()
    gate.wait()
    locks[(i + 1) % 4].acquire()  # HERE


ts = [threading.Thread(target=stage, args=(i,), name=f"stage{i}") for i in range(4)]
for t in ts:
    t.start()
for t in ts:
    t.join()

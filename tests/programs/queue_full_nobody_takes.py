"""Bounded queue nobody empties."""

# expect: slow=yes verdict=STUCK marker=HERE
import queue

q = queue.Queue(maxsize=4)


def produce():
    n = 0
    while True:
        q.put(n)  # HERE
        n += 1


produce()

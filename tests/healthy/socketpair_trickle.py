"""A thread passes a small message over a socket pair every 1.5 seconds; recv() is not counted as reading by Linux."""

import socket
import threading
import time

ours, theirs = socket.socketpair()


def produce() -> None:
    for _ in range(12):
        time.sleep(1.5)
        theirs.sendall(b"batch")
    theirs.close()


threading.Thread(target=produce, daemon=True).start()
count = 0
while ours.recv(100):
    count += 1
print(count, "batches")

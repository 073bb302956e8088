"""Asks the kernel for whole messages from a slow sender, and writes a whole file into a pipe that is read slowly: neither
may come short because somebody looked."""
# expect: slow=yes

import os
import socket
import threading
import time

ours, theirs = socket.socketpair()
out, into = os.pipe()


def trickle():
    theirs.sendall(bytes(4))
    time.sleep(22)
    theirs.sendall(bytes(12))
    time.sleep(22)
    left = 200_000
    while left:
        left -= len(os.read(out, left))


threading.Thread(target=trickle).start()
assert len(ours.recv(16, socket.MSG_WAITALL)) == 16
assert os.write(into, bytes(200_000)) == 200_000

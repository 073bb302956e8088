"""A thread crashes inside C while the main thread sleeps."""
# expect: slow=yes cause=segfault signal=11 marker=HERE

import ctypes
import threading
import time


def decode():
    ctypes.string_at(8)  # HERE


threading.Thread(target=decode, name="decoder").start()
while True:
    time.sleep(0.1)

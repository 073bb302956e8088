"""A mapped file shrinks under its reader."""
# expect: cause=bus_error signal=7 marker=HERE

import mmap
import os

with open("weights.bin", "w+b") as file:
    file.write(b"x" * 65536)
    file.flush()
    view = mmap.mmap(file.fileno(), 65536)
    os.ftruncate(file.fileno(), 0)
    print("reading the weights")
    view[40_000]  # HERE

"""A memmap on a full disk: SIGBUS."""

# expect: cause=bus_error|disk_full signal=7 cwd_on=tmpfs:2M says="is full" needs=numpy
import numpy as np

m = np.memmap("big.dat", dtype="float32", mode="w+", shape=(8 << 20,))
m[:] = 1.0

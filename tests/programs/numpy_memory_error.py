"""numpy cannot allocate under RLIMIT_AS."""

# expect: slow=yes cause=host_memory_error exit=1 marker=HERE needs=numpy
import resource, numpy as np

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
x = np.ones((1 << 30,), dtype="float64")  # HERE

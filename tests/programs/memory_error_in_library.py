"""One allocation far too large, inside a library."""
# expect: cause=host_memory_error exit=1 marker=HERE needs=numpy

import resource

import numpy as np

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))


def make_table():
    return np.ones((1 << 20, 1 << 12))  # HERE


make_table()

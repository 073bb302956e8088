"""A null pointer is read in C."""
# expect: cause=segfault signal=11 marker=HERE says="calls C through ctypes"

import ctypes


def kernel() -> None:
    ctypes.string_at(0)  # HERE


print("launching")
kernel()

"""A failed assertion in C++ ends in abort()."""
# expect: cause=abort signal=6 marker=HERE

import ctypes


def check_in_library() -> None:
    ctypes.CDLL(None).abort()  # HERE


print("launching")
check_in_library()

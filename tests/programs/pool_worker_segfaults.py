"""A worker of a pool crashes in C within its first milliseconds, before anybody has looked at it."""
# expect: cause=segfault exit=1 marker=HERE says="a worker of the process pool crashed"

import ctypes
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def decode(number):
    if number == 3:
        ctypes.string_at(0)  # HERE
    return number


if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        print(list(pool.map(decode, range(10))))

"""The initializer of a pool reads from a pipe that stays empty."""
# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE also=THERE

import multiprocessing
import os


def begin(fd):
    os.read(fd, 1)  # THERE


def square(x):
    return x * x


if __name__ == "__main__":
    reader, writer = os.pipe()
    with multiprocessing.get_context("fork").Pool(2, begin, (reader,)) as pool:
        print(pool.apply(square, (3,)))  # HERE

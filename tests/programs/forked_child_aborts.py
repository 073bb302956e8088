"""A launcher that prints only that it lost its worker, which aborted at once."""
# expect: slow=yes cause=abort exit=1 says=SIGABRT marker=HERE

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def work(number):
    os.abort()  # HERE


if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        print(list(pool.map(work, range(3))))

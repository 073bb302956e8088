"""A ProcessPoolExecutor worker exits hard."""

# expect: slow=yes cause=worker_killed exit=1
import os
from concurrent.futures import ProcessPoolExecutor
import multiprocessing as mp


def f(x):
    os._exit(1)


if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=mp.get_context("fork")) as p:
        list(p.map(f, range(4)))

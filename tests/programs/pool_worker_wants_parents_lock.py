"""The parent holds a multiprocessing lock and waits for a worker that wants it."""
# expect: slow=yes verdict=STUCK label=DEADLOCK marker=HERE says="waits for lock 'lock'"

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

lock = multiprocessing.Lock()


def work(n):
    with lock:  # THERE
        return n


print("start")
with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
    with lock:
        print(pool.submit(work, 3).result())  # HERE

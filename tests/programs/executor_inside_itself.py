"""One worker waits for a task that only it could run."""

# expect: slow=yes verdict=STUCK also=HERE
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(1)


def inner():
    return 1


def outer():
    return pool.submit(inner).result()  # HERE


print(pool.submit(outer).result())

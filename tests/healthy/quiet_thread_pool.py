"""Workers of a thread pool spend their time in short sleeps and a little work, at several lines."""

import time
from concurrent.futures import ThreadPoolExecutor, as_completed


def label(number: int) -> int:
    time.sleep(0.9)
    total = sum(range(20_000))
    time.sleep(0.8)
    return total + number


with ThreadPoolExecutor(2) as pool:
    results = [future.result() for future in as_completed([pool.submit(label, number) for number in range(22)])]
print(len(results))

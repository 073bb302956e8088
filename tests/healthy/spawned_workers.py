"""Workers started by spawn, which import everything anew before they work."""

import multiprocessing
import time


def work(seconds: float) -> float:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(5000))
        time.sleep(0.001)
    return seconds


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print("worked", sum(pool.map(work, [2.0] * 12, chunksize=1)))

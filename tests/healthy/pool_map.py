"""The main process waits in Pool.map while two workers compute."""

import multiprocessing
import time


def tokenise(seconds: float) -> int:
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        count += len(str(count))
    return count


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print("tokenised", len(pool.map(tokenise, [1.6] * 18, chunksize=1)))

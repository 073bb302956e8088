"""The main process waits in Pool.map while one worker computes and the other has nothing left to do."""

import multiprocessing
import time


def tokenise(seconds: float) -> int:
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        count += sum(len(str(number)) for number in range(2000))
        time.sleep(0.004)
    return count


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print("tokenised", len(pool.map(tokenise, [13.0, 0.5], chunksize=1)))

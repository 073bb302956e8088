"""A Pool worker is killed; Pool starts another, but the lost task never comes back."""
# expect: verdict=STUCK|SUSPECT marker=HERE says="its task is lost"

import multiprocessing
import os
import signal


def tokenise(index: int) -> int:
    if index == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return index


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print("tokenising")
        pool.map(tokenise, range(10))  # HERE

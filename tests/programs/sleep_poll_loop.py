"""Waits for a file that never comes, politely: asleep nearly always. It looks stuck, and it is."""
# expect: verdict=STUCK|SUSPECT marker=HERE

import os
import time


def wait_for_the_other_rank() -> None:
    while not os.path.exists("rank-1.ready"):
        time.sleep(0.5)  # HERE


print("waiting for rank 1")
wait_for_the_other_rank()

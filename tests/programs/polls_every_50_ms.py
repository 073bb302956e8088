"""A poll loop waking every 50 ms and doing nothing."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE
import os, time


def wait_for_flag():
    while not os.path.exists("/nonexistent/flag"):
        time.sleep(0.05)  # HERE


wait_for_flag()

"""Pool workers that mostly wait for something outside (a rate limit), two seconds a task."""

import multiprocessing
import time


def ask(number: int) -> int:
    time.sleep(2)
    return number * number


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(3) as pool:
        print("answers", sum(pool.imap_unordered(ask, range(21))))

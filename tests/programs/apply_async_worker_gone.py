"""A Pool worker ends with os._exit inside apply_async; its result never comes."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE says="its task is lost"
import multiprocessing
import os


def score(number: int) -> int:
    os._exit(3)


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.apply_async(score, (1,)).get())  # HERE

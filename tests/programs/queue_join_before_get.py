"""join() before get(): the worker cannot end before its queue is read."""
# expect: verdict=STUCK label=DEADLOCK marker=HERE

import multiprocessing


def produce(results) -> None:
    results.put(b"x" * 10_000_000)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    worker = context.Process(target=produce, args=(results,))
    worker.start()
    print("waiting for the worker")
    worker.join()  # HERE

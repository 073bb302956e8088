"""Like a DataLoader: two workers prepare batches and put them on a queue, the main process trains in between."""

import multiprocessing
import time


def prepare(batches, first: int) -> None:
    for index in range(first, 14, 2):
        time.sleep(1.0)
        batches.put([float(index)] * 10_000)
        sum(i * i for i in range(200_000))
    batches.put(None)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    batches = context.Queue(2)
    workers = [context.Process(target=prepare, args=(batches, first)) for first in range(2)]
    for worker in workers:
        worker.start()
    ended = 0
    while ended < 2:
        batch = batches.get()
        if batch is None:
            ended += 1
        else:
            time.sleep(0.9)
    for worker in workers:
        worker.join()
    print("trained on 14 batches")

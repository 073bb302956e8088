"""As polls_for_a_sleeping_child, with a queue that is asked twice a second and a worker that rests."""
# expect: slow=yes

import multiprocessing
import queue
import time


def rest(results):
    time.sleep(24)
    results.put(1)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    worker = context.Process(target=rest, args=(results,))
    worker.start()
    while True:
        try:
            print(results.get(timeout=0.5))
            break
        except queue.Empty:
            pass
    worker.join()

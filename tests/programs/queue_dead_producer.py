"""The thread that fills the queue has died of an exception; the consumer waits on."""
# expect: verdict=STUCK label=STUCK_LOCK marker=HERE

import queue
import threading

batches: queue.Queue = queue.Queue()


def produce() -> None:
    batches.put("batch 0")
    raise ValueError("shard 1 is damaged")


threading.Thread(target=produce, name="producer").start()
while True:
    print(batches.get())  # HERE

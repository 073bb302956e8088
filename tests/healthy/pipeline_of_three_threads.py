"""Three threads joined by queues; the last one takes 2.5 s for each item and hardly uses the CPU."""
# expect: slow=yes

import queue
import threading
import time

read_items: queue.Queue[int | None] = queue.Queue(2)
parsed_items: queue.Queue[int | None] = queue.Queue(2)


def read() -> None:
    for number in range(10):
        read_items.put(number)
    read_items.put(None)


def parse() -> None:
    while (item := read_items.get()) is not None:
        parsed_items.put(item)
    parsed_items.put(None)


def store() -> None:
    while parsed_items.get() is not None:
        time.sleep(2.5)


threads = [threading.Thread(target=part) for part in (read, parse, store)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

"""A consumer waits at a condition and is notified every 4 s."""
# expect: slow=yes

import threading
import time

ready = threading.Condition()
items: list[int] = []


def produce() -> None:
    for number in range(6):
        time.sleep(4)
        with ready:
            items.append(number)
            ready.notify()


threading.Thread(target=produce).start()
for _ in range(6):
    with ready:
        ready.wait_for(lambda: items)
        items.pop()

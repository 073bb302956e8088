"""Main in a lock wait, a thread does the work in steps."""

import threading, time

done = threading.Event()


def work():
    for i in range(14):
        time.sleep(1)
        sorted(range(100_000), key=lambda x: -x)
    done.set()


threading.Thread(target=work).start()
done.wait()

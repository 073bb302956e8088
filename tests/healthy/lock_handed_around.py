"""Three threads hand a lock around; each holds it for 2.5 s and works a little."""
# expect: slow=yes

import threading
import time

lock = threading.Lock()


def work():
    for _ in range(3):
        with lock:
            time.sleep(2.5)
            sum(range(50_000))


threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

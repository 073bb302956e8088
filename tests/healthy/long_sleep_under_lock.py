"""A thread sleeps for longer than the limit while it holds the lock that two others wait for; main joins them."""
# expect: slow=yes

import threading
import time

account = threading.Lock()


def poll_the_cluster() -> None:
    with account:
        time.sleep(9)


threads = [threading.Thread(target=poll_the_cluster) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

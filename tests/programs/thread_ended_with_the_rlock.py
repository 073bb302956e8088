"""A thread took an RLock and ended with it."""
# expect: slow=yes verdict=STUCK marker=HERE says="nobody is left who could end this wait"

import threading

lock = threading.RLock()
worker = threading.Thread(target=lock.acquire)
worker.start()
worker.join()
print("worker is done")
with lock:  # HERE
    print("never")

"""Workers share a lock of a multiprocessing.Manager; one has exited while it held it."""
# expect: slow=yes verdict=STUCK marker=HERE also=THERE says="is serving, and in it the call of"

import multiprocessing
import os


def work(lock, number):
    lock.acquire()  # THERE
    if number == 0:
        os._exit(1)
    lock.release()


if __name__ == "__main__":
    lock = multiprocessing.Manager().Lock()
    first = multiprocessing.Process(target=work, args=(lock, 0))
    first.start()
    first.join()
    multiprocessing.Process(target=work, args=(lock, 1)).start()
    with lock:  # HERE
        print("merged")

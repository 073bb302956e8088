"""Main joins a thread while it holds the lock the thread wants."""

# expect: slow=yes verdict=STUCK marker=HERE also=THERE
import threading

state_lock = threading.Lock()


def flush():
    with state_lock:  # THERE
        print("flushed")


with state_lock:
    t = threading.Thread(target=flush, name="flusher")
    t.start()
    t.join()  # HERE

"""fork() while a thread holds a lock: the copy of the lock in the child is never let go."""
# expect: verdict=STUCK label=STUCK_CHILD marker=HERE also=THERE

import os
import threading

lock = threading.Lock()
is_held = threading.Event()


def log_for_ever() -> None:
    with lock:
        is_held.set()
        threading.Event().wait()


threading.Thread(target=log_for_ever, daemon=True).start()
is_held.wait()
pid = os.fork()
if pid == 0:
    with lock:  # THERE
        os._exit(0)
print("waiting for worker", pid)
os.waitpid(pid, 0)  # HERE

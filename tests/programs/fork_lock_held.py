"""Forks while a thread holds a lock; the child needs it."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE also=THERE
import os, threading, time

log_lock = threading.Lock()
held, release = threading.Event(), threading.Event()


def hold():
    with log_lock:
        held.set()
        release.wait()


threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    log_lock.acquire()  # THERE
    os._exit(0)
release.set()
os.waitpid(pid, 0)  # HERE

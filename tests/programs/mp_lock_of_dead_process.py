"""A process was killed while it held a multiprocessing Lock."""

# expect: slow=yes verdict=STUCK|SUSPECT marker=HERE
import multiprocessing as mp, os, signal

ctx = mp.get_context("fork")
lock = ctx.Lock()


def hold():
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


p = ctx.Process(target=hold)
p.start()
p.join()
print("worker gone")
lock.acquire()  # HERE

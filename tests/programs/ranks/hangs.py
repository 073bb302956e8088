"""A stranger's distributed script in which one rank does not arrive at a collective, in a chosen way."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

kind, size = sys.argv[1], int(os.environ["WORLD_SIZE"])
who = size - 1


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # HERE sigstop


def hold_the_gil() -> None:
    sum(range(10**12))  # HERE gil


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # HERE deadlock


def read_slowly() -> None:
    time.sleep(1000)  # HERE slowdata


def miss() -> None:
    dist.barrier()  # HERE missing


ODD = {"sigstop": stop, "gil": hold_the_gil, "deadlock": deadlock, "slowdata": read_slowly, "missing": miss}

dist.init_process_group("gloo")
rank = dist.get_rank()
seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 1e9
began = time.monotonic()
step = 0
while True:
    step += 1
    print("step", step, flush=True)
    if step == 5 and rank == who and kind in ODD:
        ODD[kind]()
    shape = 7 if kind == "shapes" and step == 5 and rank == who else 4
    done = torch.ones(shape) * float(time.monotonic() - began > seconds)
    dist.all_reduce(done)  # THERE
    if kind == "healthy":
        sum(range(2_000_000))
        if rank == 0 and step % 20 == 0:
            time.sleep(8)  # an evaluation that only rank 0 does
    if kind == "leaves" and step == 5 and rank == who:
        os._exit(0)
    if done[0] > 0:
        break

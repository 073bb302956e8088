"""A worker keeps every example; the kernel ends the worker, and its line must still be known then."""
# expect: cause=kernel_oom exit=1 marker=HERE memory_limit=600M

import multiprocessing
import time


def prepare(shard: int) -> int:
    kept = []
    while True:
        kept.append((bytearray(b"x") * (8 << 20), time.sleep(0.1)))  # HERE


if __name__ == "__main__":
    worker = multiprocessing.get_context("fork").Process(target=prepare, args=(0,))
    worker.start()
    worker.join()
    if worker.exitcode:
        raise SystemExit(1)

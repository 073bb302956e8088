# mypy: ignore-errors
"""Between processes: multiprocessing locks that this process holds, and the children that it has started."""

import gc
import os
import sys

from _jackline_inside import slots

_MOST_CHILDREN = 256


def held_locks():
    """Names of multiprocessing locks that a thread of this process holds."""
    module = sys.modules.get("multiprocessing.synchronize")
    if module is None:
        return []
    kinds = (module.Lock, module.RLock, module.Condition)
    found = set()
    for value in gc.get_objects():
        if type(value) in kinds:
            lock = value._lock if type(value) is module.Condition else value
            if lock._semlock._count() > 0:
                found.add(key_of(lock._semlock))
    return sorted(found)


def key_of(lock):
    """A name that is equal in all processes: the file that its memory is mapped from. With fork it has no other."""
    for line in _maps():
        span, _, _, device, inode = line.split()[:5]
        start, _, end = span.partition("-")
        if int(start, 16) <= lock.handle < int(end, 16):
            return f"sem:{device}:{inode}"
    return f"sem:{lock.name}:{lock.handle:x}"


def _maps():
    try:
        with open("/proc/self/maps") as file:
            return [line for line in file if "/sem." in line]
    except OSError:
        return []


_ROLES = (
    ("multiprocessing/pool.py", "worker", "worker of a Pool"),
    ("concurrent/futures/process.py", "_process_worker", "worker of a ProcessPoolExecutor"),
    ("multiprocessing/managers.py", "_run_server", "server of a Manager"),
)


def role(frames):
    """What this process is for: 'DataLoader worker 1', 'rank 3'; '' when it is not known."""
    for frame in frames:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if function == "_worker_loop" and file.endswith("torch/utils/data/_utils/worker.py"):
            return f"DataLoader worker {slots.local(frame, 'worker_id')}"
        for part, name, words in _ROLES:
            if function == name and file.endswith(part):
                return words
    rank = os.environ.get("RANK", "")
    return f"rank {rank}" if rank.isdigit() and os.environ.get("WORLD_SIZE", "").isdigit() else ""


def remarks():
    """Sentences about pools of processes that have lost a worker."""
    module = sys.modules.get("multiprocessing.pool")
    if module is None:
        return []
    found = []
    for value in gc.get_objects():
        if isinstance(value, module.Pool) and type(value) is not module.ThreadPool and hasattr(value, "_pool"):
            found += _lost_by(value)
    return found


def _lost_by(pool):
    """Children are numbered one after another, so the newest number tells how many there were. Workers of a Pool do
    not end while it has tasks."""
    names = [str(getattr(worker, "_name", "")) for worker in list(pool._pool or ())]
    numbers = [int(name.rpartition("-")[2]) for name in names if name.rpartition("-")[2].isdigit()]
    num_ended = max(numbers, default=0) - len(list_children())
    if num_ended <= 0 or not pool._cache or getattr(pool, "_maxtasksperchild", None) is not None:
        return []
    words = "1 child process has ended" if num_ended == 1 else f"{num_ended} child processes have ended"
    return [f"{words}: if a worker of the Pool was killed, its task is lost, and the Pool waits for it for ever"]


def list_children():
    """[{pid, name}] of processes started by multiprocessing."""
    module = sys.modules.get("multiprocessing.process")
    children = list(getattr(module, "_children", ())) if module is not None else []
    found = []
    for child in children[:_MOST_CHILDREN]:
        pid = getattr(getattr(child, "_popen", None), "pid", None)
        if isinstance(pid, int):
            found.append({"pid": pid, "name": str(getattr(child, "_name", ""))})
    return found

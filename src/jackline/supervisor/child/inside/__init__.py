# mypy: ignore-errors
"""Runs inside a supervised Python process when the supervisor asks who waits for whom (inject/sitecustomize.py).

Owns the report: JACKLINE_STACKS/in.PID, one JSON object. It calls nothing of the user's: no property, no `__repr__`,
no lock. Standard library only; the folder is not on PYTHONPATH, so its modules are `_jackline_inside.*`.
"""

import json
import os
import time

from _jackline_inside import awaited, gpu_memory, loops, processes

_MOST_THREADS = 256
_LISTENERS = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("rescue.py", "recorder.py"))


def write_report(folder, interrupted, fork):
    """`interrupted` is the frame that the signal interrupted, `fork` what the fork hook has seen; whole or absent."""
    gpu_memory.answer(folder)
    report = make_report(interrupted, fork)
    path = os.path.join(folder, f"in.{os.getpid()}")
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(report).encode("utf-8", "replace"))
    finally:
        os.close(fd)
    os.rename(path + ".new", path)


def make_report(interrupted, fork):
    frames = awaited.thread_frames()
    me = awaited.current_ident()
    frames[me] = interrupted
    stacks = {ident: awaited.list_frames(frame) for ident, frame in list(frames.items())[:_MOST_THREADS]}
    stacks = {ident: stack for ident, stack in stacks.items() if ident == me or not _is_listener(stack)}
    threads = awaited.list_threads(stacks)
    return {
        "pid": os.getpid(),
        "at_s": time.monotonic(),
        "threads": threads,
        "loops": loops.list_loops(stacks),
        "held": processes.held_locks(),
        "children": processes.list_children(),
        "fork": fork,
        "role": processes.role(stacks.get(me, ())),
        "remarks": processes.remarks(),
    }


def _is_listener(stack):
    """Our own thread, which waits to be asked (rescue.py, recorder.py)."""
    return any(frame.f_code.co_name == "_listen" and frame.f_code.co_filename in _LISTENERS for frame in stack)

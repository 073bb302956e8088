"""What a main thread really waits for, when it waits for another thread that does the work. Pure."""

from __future__ import annotations

from dataclasses import replace

from jackline.diagnosis.frames import ProcessStack, ThreadStack
from jackline.machine.readings import Wait

# Files whose frames mean that a thread waits for what other threads fetch.
_COLLECTS = ("/fsspec/asyn.py", "/concurrent/futures/", "/queue.py", "/multiprocessing/pool.py", "/anyio/", "/httpx/")
_COLLECTING_WAITS = ("lock", "sleep", "unknown")
IDLE_LOOP = "waiting in its event loop"
_LOOP_WAITS = ("poll", "local_socket", "pipe")
_LOOPS = ("/asyncio/base_events.py", "/trio/_core/_run.py")
_POLLS = ("/selectors.py", "/asyncio/", "/trio/_core/")


def effective_wait(stack: ProcessStack | None, wait: Wait) -> Wait:
    """The wait of the thread that works for the main thread, if that waits for the network; else `wait` itself.

    fsspec and many clients run their requests in a thread of their own. Then the main thread waits for a lock, and
    that says nothing.
    """
    main = stack.main if stack else None
    if stack is None or main is None or wait.kind not in _COLLECTING_WAITS:
        return wait
    if not any(part in frame.file for frame in main.frames for part in _COLLECTS):
        return wait
    far_ends = [end for thread in stack.threads if not thread.is_main and (end := _far_end(thread))]
    return replace(wait, kind="network", target=far_ends[0], is_endless=False) if far_ends else wait


def _far_end(thread: ThreadStack) -> str:
    """The address that a thread waits for; '' for a server that waits for clients."""
    kind, _, target = thread.wait.partition(" ")
    return target if kind == "network" and not target.startswith("listening") else ""


def is_idle_loop(stack: ProcessStack | None, wait: Wait) -> bool:
    """Whether the main thread stands in the poll of an event loop, with nothing to do: what it polls is the loop's
    own pipe, by which other threads wake it up."""
    main = stack.main if stack else None
    if main is None or wait.kind not in _LOOP_WAITS:
        return False
    for frame in main.frames:
        if frame.file.endswith(_LOOPS):
            return True
        if not any(part in frame.file for part in _POLLS):
            return False
    return False

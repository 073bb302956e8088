"""What a main thread really waits for, when it waits for another thread that does the work. Pure."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.machine.readings import Wait

# Files whose frames mean that a thread waits for what other threads fetch.
_COLLECTS = ("/fsspec/asyn.py", "/concurrent/futures/", "/queue.py", "/multiprocessing/pool.py", "/anyio/", "/httpx/")
_CLIENTS = ("/grpc/_channel.py", "/grpc/_common.py")
_COLLECTING_WAITS = ("lock", "sleep", "unknown")
IDLE_LOOP = "waiting in its event loop"
# What a thread awaits in a function of Python's own library. In the kernel all of these are a lock.
_AWAITED: dict[str, dict[str, str]] = {
    "/threading.py": {
        "join": "the end of a thread",
        "_wait_for_tstate_lock": "the end of a thread",
        "_join_os_thread": "the end of a thread",
        "_shutdown": "the end of its other threads, at exit",
        "wait": "a signal of another thread",
        "wait_for": "a signal of another thread",
    },
    "/queue.py": {
        "get": "an item of a queue",
        "put": "room in a full queue",
        "join": "the items of a queue to be done",
    },
    "/concurrent/futures/_base.py": dict.fromkeys(
        ("result", "exception", "wait", "as_completed", "result_iterator"), "the result of a future"
    ),
    "/concurrent/futures/thread.py": {"shutdown": "the end of a pool's threads"},
    "/multiprocessing/pool.py": dict.fromkeys(("wait", "get", "next"), "the results of a pool"),
}
_LOOP_WAITS = ("poll", "local_socket", "pipe")
_LOOPS = ("/asyncio/base_events.py", "/trio/_core/_run.py")
_POLLS = ("/selectors.py", "/asyncio/", "/trio/_core/")


def effective_wait(stack: ProcessStack | None, wait: Wait) -> Wait:
    """The wait of the thread that works for the main thread, if that waits for the network; else `wait` itself.

    fsspec and many clients run their requests in a thread of their own. Then the main thread waits for a lock, and
    that says nothing.
    """
    main = stack.main if stack else None
    if stack is None or main is None or wait.kind not in (*_COLLECTING_WAITS, "poll"):
        return wait
    if _is_in_client(main):
        return replace(wait, kind="network", target="", is_endless=False)
    if not any(part in frame.file for frame in main.frames for part in _COLLECTS):
        return wait
    far_ends = [end for thread in stack.threads if not thread.is_main and (end := _far_end(thread))]
    return replace(wait, kind="network", target=far_ends[0], is_endless=False) if far_ends else wait


def _is_in_client(main: ThreadStack) -> bool:
    """Whether it waits inside of a library whose threads without Python code talk to a server."""
    inner = itertools.takewhile(lambda frame: not frame.is_user, main.frames)
    return any(part in frame.file for frame in inner for part in _CLIENTS)


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


_DATABASE_CALL = re.compile(r"\.(execute|executemany|executescript|commit)\(")


def is_at_locked_database(stack: ProcessStack | None, wait: Wait) -> bool:
    """Whether the main thread sleeps inside of a call to a database: SQLite does so until others unlock it."""
    main = stack.main if stack else None
    frame = main.frames[0] if main and main.frames else None
    return wait.kind == "sleep" and frame is not None and _DATABASE_CALL.search(frame.source) is not None


# Libraries that take a file lock by trying again and again, with a sleep in between.
_FILE_LOCKS = ("/filelock/", "/fasteners/", "/portalocker/", "/oslo_concurrency/", "/huggingface_hub/utils/_fixes.py")


def is_at_file_lock(stack: ProcessStack | None, wait: Wait) -> bool:
    """Whether the main thread sleeps inside of a library that waits for a file lock."""
    return wait.kind == "sleep" and looks_for_file_lock(stack)


def looks_for_file_lock(stack: ProcessStack | None) -> bool:
    """Whether the main thread is inside of a library that tries a file lock again and again. Its tries are no work,
    though each of them costs a millisecond on a busy machine."""
    main = stack.main if stack else None
    return main is not None and len(around_tries(main)) < len(main.frames)


def around_tries(thread: ThreadStack) -> tuple[Frame, ...]:
    """The frames outside of a library that tries a file lock: those inside of it change with every try."""
    inner = list(itertools.takewhile(lambda frame: not frame.is_user, thread.frames))
    tries = [at for at, frame in enumerate(inner) if any(part in frame.file for part in _FILE_LOCKS)]
    return thread.frames[tries[-1] + 1 :] if tries else thread.frames


def awaited_by(thread: ThreadStack | None) -> str:
    """What a thread that waits for a lock really waits for: "the end of thread 'loader'". Best read from inside; else
    the outermost function of Python's library tells. '' for a lock of the user's own."""
    if thread is None or thread.awaits:
        return thread.awaits if thread else ""
    found = ""
    for frame in thread.frames:
        known = next((words for file, words in _AWAITED.items() if frame.file.endswith(file)), None)
        if known is None:
            break
        found = known.get(frame.function.rpartition(".")[2], found)
    return found

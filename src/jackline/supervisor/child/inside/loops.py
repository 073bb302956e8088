# mypy: ignore-errors
"""asyncio (and trio) event loops: their tasks, and the line at which each one awaits."""

import sys

from _jackline_inside import awaited, slots

_MOST_TASKS = 64


def list_loops(stacks):
    """[{ident, tasks: [{name, coroutine, file, line, awaits}], num_tasks}] for each thread that runs a loop."""
    found = []
    for ident, frames in stacks.items():
        for frame in frames:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            if function == "run_forever" and file.endswith(("asyncio/base_events.py", "asyncio/windows_events.py")):
                found.append(_asyncio_loop(ident, slots.local(frame, "self")))
            elif function in ("run", "unrolled_run") and file.endswith("trio/_core/_run.py"):
                found.append(_trio_loop(ident, slots.local(frame, "runner")))
    return [loop for loop in found if loop is not None]


def _asyncio_loop(ident, loop):
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or loop is None:
        return None
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    timers = [handle for handle in list(getattr(loop, "_scheduled", ())) if not getattr(handle, "_cancelled", False)]
    entries = [_asyncio_task(task) for task in tasks[:_MOST_TASKS]]
    return {
        "ident": ident,
        "library": "asyncio",
        "num_tasks": len(tasks),
        "num_timers": len(timers),
        "tasks": entries,
    }


def _asyncio_task(task):
    coroutine = task.get_coro()
    waiter = getattr(task, "_fut_waiter", None)
    frames = _frames_of(coroutine)
    name = str(getattr(coroutine, "__qualname__", "") or "")
    return {"name": task.get_name(), "awaits": _awaited_words(waiter, frames), **_coroutine_place(name, frames)}


# What a function of asyncio waits for. Those that wait for other tasks begin with "the tasks".
_AWAITED = {
    ("taskgroups.py", "__aexit__"): "the tasks of its group",
    ("tasks.py", "_wait"): "the tasks that it waits for",
    ("tasks.py", "wait_for"): "the tasks that it waits for",
    ("tasks.py", "sleep"): "the end of a sleep",
    ("queues.py", "get"): "an item of an empty queue",
    ("queues.py", "put"): "room in a full queue",
    ("queues.py", "join"): "the items of a queue to be done",
    ("locks.py", "wait"): "a signal (Event or Condition)",
    ("locks.py", "acquire"): "a lock",
    ("streams.py", "_wait_for_data"): "data of a stream",
    ("base_subprocess.py", "_wait"): "the end of a child process",
}


def _awaited_words(waiter, frames):
    for frame in frames:
        folder, _, file = frame.f_code.co_filename.rpartition("/")
        known = _AWAITED.get((file, frame.f_code.co_name)) if folder.endswith("asyncio") else None
        if known is not None:
            return known
    if waiter is None:
        return "its turn"
    get_name = getattr(type(waiter), "get_name", None)
    if get_name is not None:
        return f"task '{waiter.get_name()}'"
    kind = type(waiter).__name__
    return "a future" if kind == "Future" else f"a {kind}"


def _frames_of(coroutine):
    """The chain of awaits, the innermost first."""
    frames, seen = [], 0
    while coroutine is not None and seen < 60:
        seen += 1
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        frame = frame or getattr(coroutine, "ag_frame", None)
        if frame is not None:
            frames.insert(0, frame)
        coroutine = (
            getattr(coroutine, "cr_await", None)
            or getattr(coroutine, "gi_yieldfrom", None)
            or getattr(coroutine, "ag_await", None)
        )
    return frames


def _coroutine_place(name, frames):
    """The innermost line of the chain of awaits, outside the standard library and other packages if there is one."""
    own = [frame for frame in frames if "-packages" not in frame.f_code.co_filename]
    file, line = awaited.place_of(own or frames)
    return {"coroutine": name[:80], "file": file, "line": line}


def _trio_loop(ident, runner):
    tasks = list(getattr(runner, "tasks", ()) or ())
    entries = [
        {
            "name": str(getattr(task, "name", ""))[:80],
            "awaits": "",
            **_coroutine_place(
                str(getattr(getattr(task, "coro", None), "__qualname__", "") or ""),
                _frames_of(getattr(task, "coro", None)),
            ),
        }
        for task in tasks[:_MOST_TASKS]
    ]
    own = [entry for entry in entries if "/trio/" not in entry["file"]]
    return {"ident": ident, "library": "trio", "num_tasks": len(own), "num_timers": 0, "tasks": own}

# mypy: ignore-errors
"""What each thread waits for and which locks it holds.

Owns the knowledge about `threading`, `queue` and `concurrent.futures`. A plain lock does not know its owner: it is
found by the `with` blocks that threads are in, by calls of `acquire` above their current line, and by the owner that
an RLock keeps. Where none of these tells, the owner stays unknown.
"""

import _thread
import gc
import os
import re
import sys
import types

from _jackline_inside import code as codes
from _jackline_inside import processes, slots

_LOCK, _RLOCK = type(_thread.allocate_lock()), _thread.RLock
_TAKES = ("acquire", "__enter__", "_acquire_restore", "acquire_lock", "lock")
_MOST_FRAMES = 60
# Libraries that take a file lock by trying again and again, as in jackline/diagnosis/waiting.py.
_FILE_LOCKS = ("/filelock/", "/fasteners/", "/portalocker/")
_MOST_TRYING, _MOST_PATHS, _LONGEST_PATH = 12, 4, 4096
_LIBRARY = os.path.dirname(os.__file__)


def current_ident():
    return _thread.get_ident()


def thread_frames():
    """As machine/waits.py: a garbage collection inside of `sys._current_frames` may never end."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if is_collecting:
            gc.enable()


def list_frames(frame):
    frames = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames


def list_threads(stacks):
    """One entry a thread. `owner` and `target` are idents of threads of this process."""
    known = dict(getattr(sys.modules.get("threading"), "_active", {}))
    found, held = [], {}
    for ident, frames in stacks.items():
        thread = known.get(ident)
        file, line = place_of(frames)
        # Called in the main thread. After a fork, older versions keep the native id of the parent's thread.
        tid = os.getpid() if ident == current_ident() else getattr(thread, "native_id", None)
        entry = {
            "ident": ident,
            "tid": tid,
            "name": str(getattr(thread, "_name", "") or ""),
            "is_daemon": bool(getattr(thread, "_daemonic", False)),
            "file": file,
            "line": line,
            "waits": waits_of(frames),
            "holds": holds_of(frames),
            "pool": pool_of(frames),
        }
        found.append(entry)
        for hold in entry["holds"]:
            held.setdefault(hold["lock"], []).append((ident, hold))
    for entry in found:
        if entry["waits"] and entry["waits"].get("lock"):
            _find_owner(entry["waits"], stacks, held)
    return found


def pool_of(frames):
    """Of a worker of a ThreadPoolExecutor: which pool that is, and how many tasks wait for a free thread of it."""
    for frame in reversed(frames):
        if frame.f_code.co_name == "_worker" and _stem(frame) == "concurrent/futures/thread.py":
            tasks = slots.local(frame, "work_queue")
            if type(tasks).__name__ == "SimpleQueue":
                return {"id": f"{id(tasks):x}", "waiting": tasks.qsize()}
    return None


def place_of(frames):
    """(file, line) of the innermost frame outside the standard library; of the innermost one if there is none."""
    for frame in frames:
        if not _is_library(frame):
            return frame.f_code.co_filename, frame.f_lineno
    return (frames[0].f_code.co_filename, frames[0].f_lineno) if frames else ("", 0)


def _is_library(frame):
    file = frame.f_code.co_filename
    return file.startswith("<frozen") or (file.startswith(_LIBRARY) and "-packages" not in file)


def _stem(frame):
    file = frame.f_code.co_filename
    return file[len(_LIBRARY) + 1 :] if file.startswith(_LIBRARY) else ""


# -- waits ----------------------------------------------------------------------------------------------------------


def waits_of(frames):
    """What the thread waits for: {kind, what, lock, owner, target}; None when no such wait is seen."""
    if not frames:
        return None
    first = frames[0]
    return (
        _library_wait(frames)
        or _import_wait(first)
        or _file_lock_wait(frames)
        or _lock_wait(frames)
        or _queue_wait(first)
    )


def _file_lock_wait(frames):
    """Which file it is stands in a variable of the function that tries, or in its object. Nothing is opened: its disk
    may be dead."""
    for frame in frames[:_MOST_TRYING]:
        if any(part in frame.f_code.co_filename for part in _FILE_LOCKS):
            named = [(name, slots.local(frame, name)) for name in frame.f_code.co_varnames]
            paths = [*_paths_among(named), *_paths_among(_attributes_of(slots.local(frame, "self")))]
            if paths:
                return {"kind": "file_lock", "what": "a file lock", "paths": paths[:_MOST_PATHS]}
    return None


def _attributes_of(owner):
    try:
        stored = object.__getattribute__(owner, "__dict__")
    except Exception:
        return []
    return list(stored.items())[:32] if isinstance(stored, dict) else []


def _paths_among(named):
    """The texts whose names speak of a file."""
    texts = [(name, os.fsdecode(value)) for name, value in named if type(value) in (str, bytes)]
    is_short = [(str(name), text) for name, text in texts if 0 < len(text) <= _LONGEST_PATH]
    return [text for name, text in is_short if "file" in name or "path" in name]


def _import_wait(frame):
    """Another thread imports the same module; the lock of each module knows which one."""
    if frame.f_code.co_filename != "<frozen importlib._bootstrap>" or frame.f_code.co_name != "acquire":
        return None
    lock = slots.local(frame, "self")
    name, owner = codes.plain_attribute(lock, "name"), codes.plain_attribute(lock, "owner")
    if not isinstance(name, str) or not isinstance(owner, int):
        return None
    what = f"the import of module '{name}'"
    return {"kind": "lock", "what": what, "name": name, "lock": f"import:{id(lock):x}", "owner": owner}


def _lock_wait(frames):
    frame = frames[0]
    entered = codes.entering(frame)
    if entered is not None:
        manager, name = entered
    else:
        called = codes.calling(frame, _TAKES)
        if called is None:
            return None
        manager, name = called[0], called[2]
    lock = next(iter(locks_in(manager)), None)
    if lock is None:
        return None
    if _stem(frame) == "threading.py" or _stem(frame).startswith("multiprocessing"):
        name = _outer_name(frames, lock) or name
    # A semaphore that counts has no owner: any process may raise it.
    kind = "lock" if getattr(lock, "maxvalue", 1) == 1 or lock.kind == 0 else "semaphore"
    return {"kind": kind, "what": f"{kind} '{name}'" if name else f"a {kind}", "name": name, **identity(lock)}


def _outer_name(frames, lock):
    """What the user's own line calls a lock that a Condition or a multiprocessing lock wraps."""
    for frame in frames[1:]:
        if _is_library(frame):
            continue
        entered = codes.entering(frame) or codes.calling(frame, _TAKES)
        if entered is not None and lock in locks_in(entered[0]):
            return entered[1] if len(entered) == 2 else entered[2]
        return ""
    return ""


def _queue_wait(frame):
    called = codes.calling(frame, ("get", "put"))
    if called is None or type(called[0]).__name__ != "SimpleQueue":
        return None
    is_idle = _stem(frame) == "concurrent/futures/thread.py"
    what = "its next task" if is_idle else f"an item of the queue '{called[2]}'"
    return {"kind": "idle" if is_idle else "threads", "what": what}


def _library_wait(frames):
    """A wait inside `threading`, `queue` or `concurrent.futures`: the outermost function of those decides."""
    found = None
    for frame in frames:
        stem, function = _stem(frame), frame.f_code.co_name
        if stem not in _WAITS:
            break
        found = _WAITS[stem](frame, function) or found
    return found


def _threading_wait(frame, function):
    if function in ("join", "_wait_for_tstate_lock", "_join_os_thread"):
        target = slots.local(frame, "self")
        ident = codes.plain_attribute(target, "_ident") if target is not None else None
        name = codes.plain_attribute(target, "_name") if target is not None else ""
        return {"kind": "join", "what": f"the end of thread '{name}'", "target": ident}
    if function == "_shutdown":
        return {"kind": "exit", "what": "the end of its other threads, at exit"}
    if function != "wait" and function != "wait_for" and not (function == "acquire" and _is_semaphore(frame)):
        return None
    # `with condition:` and `Condition.wait` after its notification wait for the lock itself.
    if codes.calling(frame, ("_acquire_restore",)) is not None:
        return None
    kind = type(slots.local(frame, "self")).__name__
    return {"kind": "threads", "what": f"a signal of another thread ({kind})"}


def _is_semaphore(frame):
    return "Semaphore" in type(slots.local(frame, "self")).__name__


def _queue_method(frame, function):
    words = {
        "get": "an item of a queue that is empty",
        "put": "room in a queue that is full",
        "join": "the items of a queue to be done",
    }
    return {"kind": "threads", "what": words[function]} if function in words else None


def _future_wait(frame, function):
    if function in ("result", "exception", "wait", "as_completed", "result_iterator"):
        return {"kind": "threads", "what": "the result of a future"}
    return None


def _pool_wait(frame, function):
    is_result = function in ("wait", "get", "next")
    return {"kind": "threads", "what": "the results of a pool"} if is_result else None


_WAITS = {
    "threading.py": _threading_wait,
    "queue.py": _queue_method,
    "concurrent/futures/_base.py": _future_wait,
    "multiprocessing/pool.py": _pool_wait,
}


# -- locks and their owners -----------------------------------------------------------------------------------------


def locks_in(manager):
    """The lock itself, or the locks that a Condition, a multiprocessing lock or an object of the user's keeps."""
    if manager is None:
        return []
    if _is_lock(manager):
        return [manager]
    try:
        stored = object.__getattribute__(manager, "__dict__")
    except Exception:
        return []
    values = list(stored.values())[:32] if isinstance(stored, dict) else []
    return [value for value in values if _is_lock(value)]


def _is_lock(value):
    if type(value) in (_LOCK, _RLOCK):
        return True
    module = sys.modules.get("_multiprocessing")
    return module is not None and type(value) is getattr(module, "SemLock", None)


def identity(lock):
    """{lock, owner}: a name that is equal for the same lock, also across processes, and its owner if it knows one."""
    if type(lock) is _LOCK:
        return {"lock": f"{id(lock):x}", "owner": None}
    if type(lock) is _RLOCK:
        owner = re.search(r"owner=(\d+)", repr(lock))
        return {"lock": f"{id(lock):x}", "owner": int(owner[1]) or None if owner else None}
    return {"lock": processes.key_of(lock), "owner": None}


def holds_of(frames):
    """The locks of the `with` blocks that the frames are in: [{lock, name, file, line}], the innermost first."""
    found = []
    released = _released_by_wait(frames)
    for frame in frames:
        if not read_entries(frame):
            continue
        for manager, name, line in codes.entered_blocks(frame):
            found += [_hold(lock, name, frame, line) for lock in locks_in(manager) if lock not in released]
            found += _held_by_generator(manager)
    return found


def _held_by_generator(manager):
    """What `with f():` holds, if contextlib.contextmanager made f: its generator waits at its yield."""
    generator = codes.plain_attribute(manager, "gen") if manager is not None else None
    if not isinstance(generator, types.GeneratorType) or generator.gi_frame is None or generator.gi_running:
        return []
    return holds_of([generator.gi_frame])


def _released_by_wait(frames):
    """`Condition.wait` gives the lock of its `with` block back while it waits."""
    waits = [frame for frame in frames if _stem(frame) == "threading.py" and frame.f_code.co_name == "wait"]
    return [lock for frame in waits for lock in locks_in(slots.local(frame, "self"))]


def read_entries(frame):
    return getattr(frame.f_code, "co_exceptiontable", b"")


def _hold(lock, name, frame, line):
    return {"lock": identity(lock)["lock"], "name": name, "file": frame.f_code.co_filename, "line": line}


def _find_owner(waits, stacks, held):
    """Fill in who owns the awaited lock: by `with`, else by `acquire` without `release` above the current line."""
    wanted, known = waits["lock"], waits.get("owner")
    if known is not None and known not in stacks:
        waits["lost_owner"] = _name_of_ended(known)  # None: it may live where no frame of it is seen
    owners = held.get(wanted, [])
    if not owners:
        owners = [(ident, hold) for ident, frames in stacks.items() for hold in _acquired(frames, wanted)]
    owners = [(ident, hold) for ident, hold in owners if known in (None, ident)]
    if len({ident for ident, _ in owners}) == 1:
        waits["owner"], waits["held_at"] = owners[0]


def _name_of_ended(ident):
    """The name of a thread that is known to have ended, because somebody still has its object; else None. A thread
    that a library has made, and one behind the 256 that are looked at, may live."""
    threading = sys.modules.get("threading")
    if threading is None or ident in threading._active or ident in thread_frames():
        return None
    threads = [one for one in gc.get_objects() if issubclass(type(one), threading.Thread)]
    names = [codes.plain_attribute(one, "_name") for one in threads if codes.plain_attribute(one, "_ident") == ident]
    return str(names[0]) if len(names) == 1 else None


def _acquired(frames, wanted):
    for number, frame in enumerate(frames):
        calls = codes.calls_before(frame, ("acquire", "release"))
        # The last call of a frame that waits is the one that it is in.
        current = codes.calling(frame, ("acquire",)) if number == 0 else None
        if current is not None and calls and calls[-1][1] == "acquire":
            calls = calls[:-1]
        matching = [call for call in calls if any(identity(lock)["lock"] == wanted for lock in locks_in(call[0]))]
        if matching and matching[-1][1] == "acquire":
            lock = locks_in(matching[-1][0])[0]
            yield _hold(lock, matching[-1][2], frame, matching[-1][3])

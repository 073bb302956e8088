# mypy: ignore-errors
"""PyTorch's flight recorder: which collectives this rank has called, told when the supervisor asks.

Loaded when a process group is made (inject/sitecustomize.py). Before that the recorder is switched on, unless the
person has set its size. Afterwards a thread of our own sleeps at a FIFO (JACKLINE_STACKS/flight.PID) and answers with
a file beside it: the main thread is in C++ code when it matters, and runs no Python. torch's JSON is read, never its
pickle. Everything here fails open.
"""

import _thread
import contextlib
import fcntl
import json
import os
import sys

_LOWEST_FD = 700
_MOST_CALLS = 24  # of a group
_MOST_GROUPS = 64
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_SIZE = "2000"
_door = {"pid": 0}


def switch_on():
    """torch reads the variable when the first group is made. Since 2.9 it has another name, and warns of the old."""
    try:
        if not any(name in os.environ for name in _SIZES):
            version = str(sys.modules["torch"].__version__).split(".")
            is_new = (int(version[0]), int(version[1])) >= (2, 9)
            os.environ[_SIZES[0 if is_new else 1]] = _SIZE
    except Exception:
        pass


def open_door(c10d, folder):
    try:
        if _door["pid"] == os.getpid() or c10d.get_world_size() < 2 or not _dumps():
            return
        path = os.path.join(folder, f"flight.{os.getpid()}")
        if os.path.exists(path):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        low = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # for both, so that it never ends
        try:
            fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD)
        finally:
            os.close(low)
        _door["pid"] = os.getpid()
        _thread.start_new_thread(_listen, (fd, path, c10d))
    except Exception:
        pass


def _listen(fd, path, c10d):
    rest = b""
    while True:
        try:
            rest += os.read(fd, 4096)
        except OSError:
            return
        *lines, rest = rest.split(b"\n")
        if lines:
            with contextlib.suppress(Exception):
                _answer(lines[-1].decode("ascii", "replace"), path + ".json", c10d)


def _answer(question, path, c10d):
    told = {"question": question, "pid": os.getpid(), "rank": c10d.get_rank(), "world_size": c10d.get_world_size()}
    told["groups"] = read_groups([json.loads(dump(True, False)) for dump in _dumps()])
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(told).encode("ascii"))
    finally:
        os.close(fd)
    os.rename(path + ".new", path)


def _dumps():
    """torch's functions that return the recorder's contents as JSON: of every backend, or of NCCL alone."""
    library = sys.modules.get("torch._C._distributed_c10d")
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [dump for name in names if (dump := getattr(library, name, None)) is not None]


def read_groups(dumps):
    """{"0": {"name": "default_pg", "calls": [{seq, call, sizes, dtypes, is_done, at_s, timeout_ms}, ...]}, ...}: the
    last calls of each group, in their order. Messages between two ranks are left out: they have no common order."""
    groups = {}
    for dump in dumps:
        for entry in dump.get("entries") or ():
            if entry.get("is_p2p"):
                continue
            key, *name = entry.get("process_group") or ("0",)
            group = groups.setdefault(str(key), {"name": str(name[0] if name else ""), "calls": []})
            group["calls"].append(
                {
                    "seq": int(entry.get("collective_seq_id") or 0),
                    "call": str(entry.get("profiling_name") or "").rpartition(":")[2],
                    "sizes": (entry.get("input_sizes") or [])[:8],
                    "dtypes": (entry.get("input_dtypes") or [])[:8],
                    "is_done": bool(entry.get("retired")) or entry.get("state") == "completed",
                    "at_s": int(entry.get("time_created_ns") or 0) / 1e9,
                    "timeout_ms": int(entry.get("timeout_ms") or 0),
                }
            )
    for group in groups.values():
        group["calls"] = sorted(group["calls"], key=lambda call: call["seq"])[-_MOST_CALLS:]
    return dict(list(groups.items())[-_MOST_GROUPS:])


def divide_late(module, divide, is_told):
    """A child of multiprocessing (mp.spawn) gets its own output file, as other ranks have at their start: its number
    is an argument, and known to torch by now."""
    try:
        processes = sys.modules.get("multiprocessing.process")
        is_child = processes is not None and processes.parent_process() is not None
        if os.environ.get("JACKLINE_RANKS") and is_child and not is_told and module.get_world_size() > 1:
            number = str(module.get_rank())
            divide((number, str(module.get_world_size()), os.environ.get("LOCAL_RANK") or _spawned() or number))
    except Exception:
        pass


def _spawned():
    """The number that mp.spawn has given to this process on its machine; None outside of it."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_wrap" and frame.f_code.co_filename.endswith("torch/multiprocessing/spawn.py"):
            return str(frame.f_locals.get("i"))
        frame = frame.f_back
    return None

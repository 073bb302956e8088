# mypy: ignore-errors
"""Which lines hold GPU memory, asked for when it creeps up (supervisor/attempt/gpu_creep.py).

torch's allocator can keep the Python stack of every live block. That costs a few microseconds for each allocation, so
it is switched on by the first question and off by the last. A question is the file gpu-ask.PID, read when the signal
of `inside` arrives; the answer is gpu.PID, one JSON object. A script that records its memory itself is left alone.
"""

import json
import os
import sys
import sysconfig
import time

_MOST_LINES = 200
_LIBRARIES = tuple(sorted({sysconfig.get_paths().get(name) or "" for name in ("stdlib", "purelib", "platlib")}))
_now = {"is_recording": False}


def answer(folder):
    """Do what gpu-ask.PID says: 'look' (record from now on, and say which lines hold what was allocated since) or
    'stop'. Does nothing without such a file, or without torch on a GPU."""
    path = os.path.join(folder, f"gpu-ask.{os.getpid()}")
    try:
        with open(path) as file:
            word = file.read(16).strip()
        os.unlink(path)
    except OSError:
        return
    torch = sys.modules.get("torch")
    memory = sys.modules.get("torch.cuda.memory")
    if torch is None or memory is None or not torch.cuda.is_initialized():
        return
    if word == "stop":
        _stop(memory)
        return
    if not _now["is_recording"]:
        if _is_recorded_by_script():
            return
        memory._record_memory_history("state", context="alloc", stacks="python")
        _now["is_recording"] = True
    _write(folder, {"at_s": time.monotonic(), "lines": _lines(memory._snapshot())})


def _stop(memory):
    if _now["is_recording"]:
        memory._record_memory_history(None)
        _now["is_recording"] = False


def _is_recorded_by_script():
    ask = getattr(sys.modules["torch"]._C, "_cuda_isHistoryEnabled", None)
    return ask is not None and ask()


def _lines(snapshot):
    """[[file, line, function, bytes]] of the live blocks with a known stack, the largest first."""
    sums = {}
    for segment in snapshot.get("segments", ()):
        for block in segment.get("blocks", ()):
            if block.get("state") == "active_allocated":
                place = _own_line(block.get("frames") or ())
                if place is not None:
                    sums[place] = sums.get(place, 0) + int(block.get("size", 0))
    largest = sorted(sums.items(), key=lambda item: -item[1])[:_MOST_LINES]
    return [[*place, size] for place, size in largest]


def _own_line(frames):
    """The innermost line of the script's own code."""
    for frame in frames:
        file = frame.get("filename", "")
        if file and not file.startswith(("<", *_LIBRARIES)) and "-packages" not in file:
            return file, int(frame.get("line", 0)), frame.get("name", "")
    return None


def _write(folder, contents):
    path = os.path.join(folder, f"gpu.{os.getpid()}")
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(contents).encode("utf-8", "replace"))
    finally:
        os.close(fd)
    os.rename(path + ".new", path)

"""The part of a fault that lives in the faulty process. Standard library only; told what to do by $FAULT.

It wraps one function of a module, counts the calls that touch a certain path, and on the chosen one writes down
that it fires and then kills, fails or stalls.
"""

import contextlib
import json
import os
import signal
import sys
import time


def _paths(arguments):
    """Paths among the arguments; a descriptor counts as the file it stands for."""
    for argument in arguments:
        if isinstance(argument, bool):
            continue
        if isinstance(argument, int):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/self/fd/{argument}")  # noqa: PTH115
        elif isinstance(argument, (str, bytes, os.PathLike)) and len(os.fsencode(argument)) < 4096:
            yield os.fsdecode(argument)


def _record(fault):
    fd = os.open(fault["fired"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    line = json.dumps({"pid": os.getpid(), "at_s": time.time(), "argv": sys.argv[:3]}) + "\n"
    _true_write(fd, line.encode())
    os.close(fd)


def _install(fault):
    module_name, _, function_name = fault["function"].rpartition(".")
    module = __import__(module_name, fromlist=["_"])
    original = getattr(module, function_name)
    seen = [0]

    def wrapped(*arguments, **named):
        if any(fault["path"] in path for path in _paths((*arguments, *named.values()))):
            seen[0] += 1
            if seen[0] == fault["nth"] or (fault["goes_on"] and seen[0] > fault["nth"]):
                _record(fault)
                if fault["action"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault["action"] == "stall":
                    time.sleep(fault["seconds"])
                if fault["action"] == "fail":
                    raise OSError(fault["errno"], os.strerror(fault["errno"]))
        return original(*arguments, **named)

    setattr(module, function_name, wrapped)


_true_write = os.write
if os.environ.get("FAULT"):
    _install(json.loads(os.environ["FAULT"]))

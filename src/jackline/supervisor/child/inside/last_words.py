# mypy: ignore-errors
"""What only the ending process itself knows: where it was left, and what its last error was about.

inject/sitecustomize.py loads this when `sys.exit`, `exit` or `os._exit` is called with a code other than 0, and at
the end of a process whose exception nobody caught. Owns the note, one line at the end of JACKLINE_STACKS/fh.PID,
which is open since the start: a process that has changed its user could open no other file there. It holds places in
code, names of files, its user, and how children ended; no value of a variable. Everything here fails open; what it
means is decided by `jackline.diagnosis.deaths`.
"""

import _thread
import contextlib
import json
import os
import sys
import time

from _jackline_inside import named_files, scopes

_MARK = "jackline end: "  # as in jackline/diagnosis/deaths/collect.py
_MOST_PLACES, _MOST_ERRORS, _MOST_CHILDREN = 16, 8, 16
_PATIENCE_S = 1.0  # a child's pipe closes a moment before its exit status can be read
_kept = {}


def keep(how, status, frame):
    """It is about to leave. Only what ends it in fact is written: somebody may catch the SystemExit."""
    note = {"how": how, "code": _code_of(status), "frames": _places(scopes.listed(frame))}
    error = sys.exc_info()[1]
    if isinstance(error, Exception):
        note.update(_about(error))
    _kept["note"] = (os.getpid(), _thread.get_ident(), note)


def write(fd, inode):
    """At the end, in the main thread."""
    error = getattr(sys, "last_value", None)
    pid, ident, note = _kept.get("note", (0, 0, None))
    if isinstance(error, Exception) and not (note and note["how"] == "os._exit"):
        note = {"how": "exception", "code": 1, "frames": [], **_about(error)}
    elif pid != os.getpid() or ident != _thread.get_ident():
        return
    note.update(pid=os.getpid(), at_s=time.time(), user=[os.geteuid(), os.getegid(), *os.getgroups()])
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) == inode:  # otherwise the program closed it, and opened another file
        os.write(fd, f"\n{_MARK}{json.dumps(note)}\n".encode())


def _code_of(status):
    """As Python does it: words go to stderr and mean 1."""
    if status is None:
        return 0
    return int(status) & 0xFF if isinstance(status, int) else 1


def _places(frames):
    """[(file, line, function)], innermost first, without Jackline's own."""
    own = [(frame.f_code, line) for frame, line in frames if not frame.f_code.co_filename.startswith(scopes.PACKAGE)]
    return [[code.co_filename, line or 0, code.co_name] for code, line in own[:_MOST_PLACES]]


def _chain(error):
    """The error and those that it came from, the first that was raised last."""
    found = []
    while isinstance(error, BaseException) and error not in found and len(found) < _MOST_ERRORS:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def _about(error):
    errors = _chain(error)
    first = errors[-1]
    frames = [place for one in reversed(errors) for place in scopes.traced(one.__traceback__)]
    note = {"error": type(first).__name__, "raised": _places(scopes.traced(first.__traceback__))}
    for name, find in (("files", named_files.files_of), ("pipes", _pipes_of)):
        with contextlib.suppress(Exception):
            note[name] = find(first, frames)
    return note


# -- the other end of a pipe -----------------------------------------------------------------------------------------


def _pipes_of(error, frames):
    """Which of its pipes has lost its reader, and how its children have ended."""
    if not isinstance(error, (BrokenPipeError, ConnectionResetError, EOFError)):
        return []
    found = [{"what": name} for fd, name in ((1, "stdout"), (2, "stderr")) if _is_broken(fd)]
    return [*[{**one, "is_broken": True} for one in found], *_commands(), *_workers()]


def _is_broken(fd):
    import select

    try:
        poll = select.poll()
        poll.register(fd, 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (OSError, ValueError):
        return False


def _commands():
    """The children that `subprocess` has started."""
    commands = _objects_of("subprocess", "Popen")
    return [_child("child", _program(one.args), one.pid, one.returncode, _is_stdin_broken(one)) for one in commands]


def _is_stdin_broken(command):
    try:
        return command.stdin is not None and _is_broken(command.stdin.fileno())
    except (OSError, ValueError):  # closed
        return False


def _program(args):
    """'python train.py', 'sort', the first word of a shell's line: the rest may hold a secret."""
    words = args.split()[:1] if isinstance(args, str) else [os.fsdecode(one) for one in args][:2]
    name = os.path.basename(words[0]) if words else "?"
    is_script = len(words) > 1 and name.startswith("python") and words[1].endswith(".py")
    return f"{name} {os.path.basename(words[1])}" if is_script else name


def _workers():
    """The children of multiprocessing, which its own exit has waited for by now."""
    children = _objects_of("multiprocessing.process", "BaseProcess")
    known = [(one, popen) for one in children if (popen := vars(one).get("_popen")) is not None]
    return [
        _child("worker", str(one._name), popen.pid, getattr(popen, "returncode", None), False) for one, popen in known
    ]


def _objects_of(module, name):
    import gc

    kind = getattr(sys.modules.get(module), name, None)
    return [one for one in gc.get_objects() if kind in type(one).__mro__][:_MOST_CHILDREN] if kind else []


def _child(what, name, pid, returncode, is_broken):
    until_s = time.monotonic() + (_PATIENCE_S if is_broken else 0.0)
    code = returncode if returncode is not None else _returncode(pid)
    while code is None and time.monotonic() < until_s:
        time.sleep(0.01)
        code = _returncode(pid)
    return {"what": what, "name": name, "pid": pid, "returncode": code, "is_broken": is_broken}


def _returncode(pid):
    """As Popen.returncode, without taking the status from those who wait for it."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return None
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

# ruff: noqa: UP024, UP031, UP036, PTH100, PTH112, SIM105, PERF203, RUF100
# mypy: ignore-errors
"""Runs at the start of every Python of a supervised run, because its folder is first on PYTHONPATH.

Owns: the file a process dumps its stacks to (JACKLINE_STACKS/fh.PID), the signal that asks for a dump, line
buffering, and running the sitecustomize it stands in front of. It changes nothing else, imports nothing slow, and
works (or does nothing) on every Python from 2.7 on: no syntax newer than that here.
"""

import os
import sys

# Far from the numbers a program gets for its own files: a script that closes descriptors 3 to 100 and opens others
# must not find our dumps in them.
_LOWEST_FD = 700
_PR_SET_PTRACER = 0x59616D61
_state = {"fd": -1, "inode": None, "folder": None}


def _open_dump_file():
    """Open fh.PID at a high descriptor that children do not inherit."""
    import fcntl

    path = os.path.join(_state["folder"], "fh.%d" % os.getpid())
    low = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD)
    except (OSError, ValueError):  # RLIMIT_NOFILE is below our number
        low, kept = -1, low
        return kept
    finally:
        if low >= 0:
            os.close(low)


def _remember(fd):
    status = os.fstat(fd)
    _state["fd"], _state["inode"] = fd, (status.st_dev, status.st_ino)


def _arm():
    import _signal  # not `signal`: that builds enums, 3 ms at every start
    import faulthandler

    fd = _open_dump_file()
    _remember(fd)
    if not faulthandler.is_enabled():  # -X faulthandler: the person wants it on stderr
        faulthandler.enable(fd, all_threads=True)
    number = int(os.environ.get("JACKLINE_STACK_SIGNAL") or 61)
    # The first signal dumps the thread that gets it: safe at any time. The second dumps all threads, which reads the
    # frames of threads that may be running and then crashes the process (seen: five signals to a busy one); it is
    # sent only to a process in which nothing moves.
    for signum, all_threads in ((number, False), (number + 1, True)):
        if _signal.getsignal(signum) == _signal.SIG_DFL:
            faulthandler.register(signum, fd, all_threads=all_threads, chain=False)
    if hasattr(os, "register_at_fork"):  # since 3.7; before, a forked child is read by other means
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork():
    """Give the child a file of its own at the same descriptor.

    Nothing is registered again: faulthandler keeps writing to the number it has, so a handler or a file that the
    person chose in the meantime stays theirs.
    """
    try:
        status = os.fstat(_state["fd"])
        if (status.st_dev, status.st_ino) != _state["inode"]:
            return  # closed by the program, and the number now belongs to another file
        fresh = _open_dump_file()
        os.dup2(fresh, _state["fd"], False)
        os.close(fresh)
        _remember(_state["fd"])
        _allow_reading()
    except Exception:
        pass


def _allow_reading():
    """Where Yama lets only ancestors look into a process, allow the stack reader, which is a sibling."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", "rb") as file:
            is_guarded = file.read(1) == b"1"
    except (IOError, OSError):
        return
    if is_guarded:
        import ctypes  # 5 ms, only where needed

        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def _buffer_by_line():
    """One write a line. PYTHONUNBUFFERED alone writes the text and its line end apart, and lines of several
    processes mix."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)


def _other_folders():
    here = os.path.realpath(os.path.dirname(os.path.abspath(__file__)))
    return [folder for folder in sys.path if os.path.realpath(folder or ".") != here]


def _find_next():
    """The sitecustomize that would have run without us, as something to call; None when there is none."""
    if sys.version_info < (3, 5):
        import imp

        try:
            found = imp.find_module("sitecustomize", _other_folders())
        except ImportError:
            return None
        return lambda: imp.load_module("sitecustomize", *found)
    folders = _other_folders()
    for finder in sys.meta_path:
        spec = finder.find_spec("sitecustomize", folders) if hasattr(finder, "find_spec") else None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            return lambda: _run(spec)
    return None


def _run(spec):
    # The import machinery hands out whatever sys.modules holds in the end, so theirs takes our place there.
    module = sys.modules["_frozen_importlib"].module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _state["folder"] = os.environ.get("JACKLINE_STACKS")
    if _state["folder"] and os.path.isdir(_state["folder"]):
        _arm()
        _allow_reading()
except Exception:
    pass
try:
    if os.environ.get("JACKLINE_LINE_BUFFERING") == "1":
        _buffer_by_line()
except Exception:
    pass
try:
    _next = _find_next()
except Exception:
    _next = None
if _next is not None:
    _next()  # outside `try`: an error of theirs is reported the way Python always reports it

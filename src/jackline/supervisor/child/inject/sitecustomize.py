# ruff: noqa: UP024, UP031, UP036, PTH100, PTH102, PTH112, PTH116, SIM105, PERF203, RUF100
# mypy: ignore-errors
"""Runs at the start of every Python process of a supervised run, because its folder is first on PYTHONPATH.

Owns: the file a process dumps its stacks to (JACKLINE_STACKS/fh.PID), the signals that ask for a dump or for a report
of who waits for whom (`inside`, loaded only when asked), the notice that torch is imported (`inside/rescue`), a
process group made (`inside/recorder`) or the process left with a failure (`inside/last_words`), line buffering, the
output file of a rank that is not the first of its machine (JACKLINE_RANKS), and running the user's own sitecustomize,
which this file hides. It changes nothing else, imports nothing slow, and works (or does nothing) on every Python from
2.7 on, so it uses no newer syntax.
"""

import os
import sys

# Far above the descriptors that a program gets for its own files: a script may close descriptors 3 to 100 and open
# others, and our dumps must not go into those.
_LOWEST_FD = 700
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_PR_SET_PTRACER = 0x59616D61
_state = {"fd": -1, "pid": os.getpid(), "folder": None, "inside": None, "forking": None, "fork": None, "rank": ""}


def _open_dump_file():
    """Open fh.PID at a high descriptor that children do not inherit."""
    import fcntl

    path = os.path.join(_state["folder"], "fh.%d" % os.getpid())
    low = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS, 0o600)
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
    if not faulthandler.is_enabled():  # already enabled with -X faulthandler: the user wants it on stderr
        faulthandler.enable(fd, all_threads=True)
    number = int(os.environ.get("JACKLINE_STACK_SIGNAL") or 61)
    # The first signal dumps the thread that receives it, which is safe at any time. The second dumps all threads. It
    # reads frames of threads that may be running, and that can crash the process (seen after five signals to a busy
    # one). So the second is sent only to a process in which no thread runs.
    for signum, all_threads in ((number, False), (number + 1, True)):
        if _signal.getsignal(signum) == _signal.SIG_DFL:
            faulthandler.register(signum, fd, all_threads=all_threads, chain=False)
    if sys.version_info >= (3, 11) and number + 2 <= 64 and _signal.getsignal(number + 2) == _signal.SIG_DFL:
        _signal.signal(number + 2, _report)
    if hasattr(os, "register_at_fork"):  # since 3.7; before, a forked child is read by other means
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _report(signum, frame):
    """Say who waits for whom. Sent only to a process that stands still; runs in its main thread."""
    try:
        if _state["inside"] is None:
            _state["inside"] = _load_inside()
        _state["inside"].write_report(_state["folder"], frame, _state["fork"])
    except Exception:
        pass


def _load_inside():
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folder = os.path.join(here, "inside")
    path = os.path.join(folder, "__init__.py")
    external = sys.modules["_frozen_importlib_external"]
    spec = external.spec_from_file_location("_jackline_inside", path, submodule_search_locations=[folder])
    module = sys.modules["_frozen_importlib"].module_from_spec(spec)
    sys.modules["_jackline_inside"] = module
    spec.loader.exec_module(module)
    return module


class _TorchWatch:
    """A finder that finds nothing: it notices the import of some modules of torch, and removes itself."""

    def __init__(self, wanted):
        self.wanted = wanted  # what to do with each module, by its name

    def find_spec(self, name, path=None, target=None):
        arm = self.wanted.pop(name, None)
        if arm is None:
            return None
        if not self.wanted:
            sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return _with(arm, spec)
        return None


def _with(arm, spec):
    """The same module; `arm` gets it once it is executed."""
    run = getattr(spec.loader, "exec_module", None)

    def run_and_arm(module):
        del spec.loader.exec_module
        run(module)
        try:
            arm(module)
        except Exception:
            pass

    try:
        spec.loader.exec_module = run_and_arm
    except Exception:
        pass  # a loader of another type: neither rescue nor recorder
    return spec


def _part(name):
    """A module of `inside`, loaded when it is first needed."""
    if _state["inside"] is None:
        _state["inside"] = _load_inside()
    __import__("_jackline_inside." + name)
    return sys.modules["_jackline_inside." + name]


def _arm_rescue(module):
    _part("rescue").arm(module, _state["folder"])


def _arm_recorder(module):
    """The flight recorder is switched on when a process group is made; a process without one pays nothing."""
    import functools

    begin = module.init_process_group

    @functools.wraps(begin)
    def init_process_group(*args, **kwargs):
        recorder = None
        try:
            recorder = _part("recorder")
            recorder.switch_on()
        except Exception:
            pass
        made = begin(*args, **kwargs)
        if recorder is not None:
            recorder.open_door(module, _state["folder"])
            recorder.divide_late(module, _divide, is_told=bool(_state["rank"]))
        return made

    module.init_process_group = init_process_group


def _mind_the_end():
    """Have noted where a process that fails was left. `inside/last_words` is loaded only then."""
    import atexit

    sys.exit, os._exit = _noting(sys.exit, "sys.exit"), _noting(os._exit, "os._exit")
    quitter = type(getattr(sys.modules["builtins"], "exit", None))
    if quitter.__name__ == "Quitter":
        quitter.__call__ = _noting(quitter.__call__, "exit")
    atexit.register(_note_the_end)


def _noting(leave, how):
    """`leave`, noted where its status is no success. No traceback shows this function."""

    def noting(*args, **kwargs):
        try:
            status = (args[how == "exit" :] + tuple(kwargs.values()) + (None,))[0]
            if status is not None and (type(status) is not int or status) and os.getpid() == _state["pid"]:
                _part("last_words").keep(how, status, sys._getframe(1))
                if how == "os._exit":
                    _note_the_end()
        except Exception:
            pass
        try:
            return leave(*args, **kwargs)
        except BaseException as problem:
            problem.__traceback__ = problem.__traceback__.tb_next
            raise

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(noting, name, getattr(leave, name))
    return noting


def _note_the_end():
    try:
        if "_jackline_inside.last_words" in sys.modules or getattr(sys, "last_value", None) is not None:
            _part("last_words").write(_state["fd"], _state["inode"])
    except BaseException:  # a Ctrl-C now would be printed as an error at exit
        _note_who_it_was()


def _note_who_it_was():
    """It may have changed its user, who can load nothing."""
    try:
        if os.fstat(_state["fd"]).st_ino == _state["inode"][1]:
            note = '\njackline end: {"how": "exception", "code": 1, "user": %s}\n'
            os.write(_state["fd"], (note % ([os.geteuid(), os.getegid()] + os.getgroups())).encode("ascii"))
    except Exception:
        pass


def _thread_frames():
    """A garbage collection inside of `sys._current_frames` may never end (before Python 3.12)."""
    import gc

    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if is_collecting:
            gc.enable()


def _before_fork():
    """Remember where the other threads are: the child has their locks, but not them."""
    try:
        frames = _thread_frames()
        _state["forking"] = None
        if len(frames) > 1:
            known = getattr(sys.modules.get("threading"), "_active", {})
            me = sys.modules["_thread"].get_ident()
            others = [(known.get(ident), frame) for ident, frame in frames.items() if ident != me]
            _state["forking"] = [_place_of(thread, frame) for thread, frame in others[:16]]
    except Exception:
        pass


def _place_of(thread, frame):
    places = []
    while frame is not None and len(places) < 8:
        places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return {"name": str(getattr(thread, "name", "")), "places": places}


def _after_fork():
    """Give the child a file of its own at the same descriptor.

    Nothing is registered again: faulthandler keeps writing to the same descriptor number. So a handler or a file that
    the user's code has set since then stays in place.
    """
    _state["fork"], _state["forking"] = {"parent": os.getppid(), "threads": _state["forking"] or []}, None
    try:
        status = os.fstat(_state["fd"])
        if (status.st_dev, status.st_ino) != _state["inode"]:
            return  # the program closed it, and the number now belongs to another file
        fresh = _open_dump_file()
        os.dup2(fresh, _state["fd"], False)
        os.close(fresh)
        _remember(_state["fd"])
        _allow_reading()
    except Exception:
        pass


def _allow_reading():
    """Allow the stack reader, a sibling process, to read this one where Yama lets only ancestors do so."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", "rb") as file:
            is_guarded = file.read(1) == b"1"
    except (IOError, OSError):
        return
    if is_guarded:
        import ctypes  # 5 ms, only where needed

        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def _buffer_by_line():
    """Write each line at once. PYTHONUNBUFFERED alone writes the text and its line end separately, and lines of
    several processes mix."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)


def _rank_place():
    """(rank, world size, local rank) as text; None outside a distributed job. JACKLINE_RANK_NAMES holds the variables
    to ask, without those that the whole command has inherited."""
    for names in os.environ.get("JACKLINE_RANK_NAMES", "").split(";"):
        words = [os.environ.get(name, "") for name in names.split(",")]
        if len(words) == 3 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 1:
            return words[0], words[1], words[2] if words[2].isdigit() else words[0]
    return None


def _divide_ranks():
    """Leave a note which rank this is. The first rank of a machine stays on the screen, every other one gets a file.

    Only output that would go to the run's own file is moved: where a launcher was told to keep logs, its way holds.
    What a rank starts inherits its descriptors, so a second call finds nothing to move."""
    place = _rank_place()
    if place is not None:
        _divide(place)


def _divide(place):
    folder = os.environ["JACKLINE_RANKS"]
    attempt = os.path.dirname(folder)
    raws = []
    for name in ("raw.out", "raw.err"):
        try:
            found = os.stat(os.path.join(attempt, name))
            raws.append((found.st_dev, found.st_ino))
        except OSError:
            pass
    mine = [fd for fd in (1, 2) if (os.fstat(fd).st_dev, os.fstat(fd).st_ino) in raws]
    if not mine:
        return
    try:
        os.mkdir(folder, 0o700)
    except OSError:
        pass
    stem = os.path.join(folder, "rank-%d" % int(place[0]))
    _state["rank"] = place[0]
    if place[2] != "0":
        own = os.open(stem + ".out", os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS, 0o600)
        for fd in mine:
            os.dup2(own, fd)
        os.close(own)
    note = '{"rank": %d, "world_size": %d, "local_rank": %d, "pid": %d}\n'
    note %= (int(place[0]), int(place[1]), int(place[2]), os.getpid())
    fd = os.open(stem + ".json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o600)
    try:
        os.write(fd, note.encode("ascii"))
    finally:
        os.close(fd)


def _other_folders():
    here = os.path.realpath(os.path.dirname(os.path.abspath(__file__)))
    return [folder for folder in sys.path if os.path.realpath(folder or ".") != here]


def _find_next():
    """A callable that runs the sitecustomize which would have run without ours; None when there is none."""
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
    # `import` returns what sys.modules holds in the end, so the user's module replaces ours there.
    module = sys.modules["_frozen_importlib"].module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _state["folder"] = os.environ.get("JACKLINE_STACKS")
    if _state["folder"] and os.path.isdir(_state["folder"]):
        _arm()
        _allow_reading()
        if sys.version_info >= (3, 11):
            wanted = {"torch.distributed.distributed_c10d": _arm_recorder}
            if os.environ.get("JACKLINE_RESCUE") == "1":
                wanted["torch.optim.optimizer"] = _arm_rescue
            sys.meta_path.insert(0, _TorchWatch(wanted))
            _mind_the_end()
except Exception:
    pass
try:
    if os.environ.get("JACKLINE_RANKS"):
        _divide_ranks()
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
    _next()  # outside `try`, so that Python reports an error in the user's file as usual

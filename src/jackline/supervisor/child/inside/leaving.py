# mypy: ignore-errors
"""The ways in which a process that trains can end, and the rescue in each of them, where Python still runs.

An uncaught exception in the main thread, in the thread that trains or in a process of `multiprocessing`; `sys.exit`
with a status that is no success; SIGTERM, where nothing else handles it. What the script has set stays, and the
process ends as it would have. Owns when; the saving is in rescue.py.
"""

import _signal
import _thread
import os
import sys

from _jackline_inside import rescue, scopes

_now = rescue._now
_LAST_WAIT_S = {"sigterm": 15.0}  # for the disk, when the process ends; the writer finishes without us too
_BOUNDARY_S = 5.0  # for a step of another thread to end
_before = {}  # what was there before ours


def stand_by():
    """Take the place of default actions only."""
    if not _before:
        _before["except"], sys.excepthook = sys.excepthook, _on_exception
        _before["exit"], sys.exit = sys.exit, _on_exit
        threading = sys.modules.get("threading")
        if threading is not None:
            _before["thread"], threading.excepthook = threading.excepthook, _on_thread_exception
        os.register_at_fork(after_in_child=_forget)
    _mind_the_end_of_a_child()
    try:
        is_alone = os.environ.get("WORLD_SIZE", "1") in ("", "0", "1")  # no collective that a handler waits for
        if is_alone and _signal.getsignal(_signal.SIGTERM) == _signal.SIG_DFL:
            _signal.signal(_signal.SIGTERM, _on_sigterm)
    except ValueError:  # not the main thread: SIGTERM ends it as before
        pass


def _forget():
    """A forked worker has no training of its own: SIGTERM must end it at once, as ever."""
    try:
        if _signal.getsignal(_signal.SIGTERM) is _on_sigterm:
            _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
        if not _now.known:
            rescue.watch_backward()
    except Exception:
        pass


def _on_exception(kind, value, trace):
    try:
        _before["except"](kind, value, trace)
    finally:
        if _now.pid == os.getpid():
            _rescue(_cause_of(kind), scopes.traced(trace), f"{kind.__name__} came")
            try:
                # Python ends by SIGINT if the text it ran last did, and a rescue runs others.
                if issubclass(kind, KeyboardInterrupt):
                    exec("raise KeyboardInterrupt")
            except KeyboardInterrupt:
                pass


def _on_thread_exception(args):
    """Of the thread that trains: Python then goes on to the end of the others."""
    try:
        _before["thread"](args)
    finally:
        if _now.pid == os.getpid() and _now.ident == _thread.get_ident() and args.exc_type is not SystemExit:
            frames = scopes.traced(args.exc_traceback)
            _rescue(_cause_of(args.exc_type), frames, f"{args.exc_type.__name__} came")


def _on_exit(*status):
    """`sys.exit(1)`: after a loss that is no number, or in a handler of all exceptions, which has their frames."""
    try:
        is_failure = bool(status) and status[0] not in (None, 0)
        if is_failure and _now.pid == os.getpid() and _now.ident == _thread.get_ident():
            frames = scopes.traced(sys.exc_info()[2]) + scopes.listed(sys._getframe(1))
            _rescue("exit", frames, "sys.exit was called")
    except Exception:
        pass
    _before["exit"](*status)


def _mind_the_end_of_a_child():
    """A process of `multiprocessing` prints the exception itself, and leaves without a hook but this one."""
    processes, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
    if util is not None and processes is not None and processes.parent_process() is not None:
        util.Finalize(None, _on_child_end, exitpriority=1000)


def _on_child_end():
    kind, _, trace = sys.exc_info()
    if kind is not None and kind is not SystemExit and _now.pid == os.getpid():
        _rescue(_cause_of(kind), scopes.traced(trace), f"{kind.__name__} came")


def _on_sigterm(number, frame):
    if _now.pid == os.getpid():
        _rescue("sigterm", scopes.listed(frame), "SIGTERM came")
    _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
    os.kill(os.getpid(), _signal.SIGTERM)


def _cause_of(kind):
    if kind.__name__ == "OutOfMemoryError":
        return "oom"
    return "interrupt" if issubclass(kind, KeyboardInterrupt) else "exception"


def _rescue(cause, frames, why):
    request = {"id": "", "cause": cause}
    wait_s = _LAST_WAIT_S.get(cause, rescue.LONG_WAIT_S)
    is_ours, of_children = False, _hold_children()
    try:
        is_done = _now.known and _now.rescued_step >= _now.num_steps
        is_ours = not is_done and _now.busy.acquire(True, wait_s)
        if not is_ours:
            return
        if _trains_elsewhere():
            rescue.answer({**request, "wait_s": _BOUNDARY_S})
            return
        rescue.remove_hooks()
        rescuer = rescue.rescuer_of()
        found = scopes.scopes_of(frames, scopes.slots_local)
        rescue.save(request, found, rescue.apart(frames, why), False)
        rescue.end(rescuer, request, wait_s)
    except BaseException as problem:  # a second Ctrl-C ends the rescue, not the traceback
        rescue.note_failure(request, problem)
    finally:
        if is_ours:
            _now.busy.release()
        if of_children is not None:
            _signal.signal(_signal.SIGCHLD, of_children)


def _hold_children():
    """Who ends a whole group ends the loader's workers too, and torch's handler of SIGCHLD raises wherever the main
    thread is: not in the middle of a rescue. The handler that was set, or None."""
    try:
        handler = _signal.getsignal(_signal.SIGCHLD)
        if callable(handler):
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            return handler
    except ValueError:  # not the main thread, where no handler runs
        pass
    return None


def _trains_elsewhere():
    """Whether another thread trains, which changes the weights while this one ends."""
    if _now.ident == _thread.get_ident():
        return False
    from _jackline_inside import awaited

    return _now.ident in awaited.thread_frames()

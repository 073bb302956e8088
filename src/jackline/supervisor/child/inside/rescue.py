# mypy: ignore-errors
"""Rescues the state of a training that never saved: when it is asked to, or when the process is about to end.

Loaded when torch's optimizers are imported (inject/sitecustomize.py). At the first optimizer step it makes a FIFO
(JACKLINE_STACKS/ask.PID), at which a thread of its own sleeps, and replaces the default actions for an uncaught
exception and SIGTERM. Saving itself is in `jackline.checkpoint.rescue`, which is imported only then. Everything here
fails open: the script's own result never depends on it.
"""

import _signal
import _thread
import json
import os
import sys
import time

_MOST_FRAMES = 60
_LOWEST_FD = 700
_MOST_PARTIAL = 64  # steps of some optimizers while another one, which has stepped before, does not
_LAST_WAIT_S = {"sigterm": 15.0}  # for the disk, when the process ends; the writer finishes without us too
_LONG_WAIT_S = 120.0
_PACKAGE = __file__.rpartition("/supervisor/child/")[0]
_LIBRARY = os.path.dirname(os.__file__)
_getpid, _ident = os.getpid, _thread.get_ident


class _Training:
    """The one training of this process: what it has counted, and the request under way."""

    def __init__(self):
        self.known = set()  # optimizers that have stepped
        self.since = set()  # those that have stepped since the last boundary

    pid = 0
    folder = ""  # JACKLINE_STACKS
    hook = None  # the handle of the counting hook
    num_partial = 0
    num_steps = 0
    first_s = 0.0
    ident = 0  # the thread that steps
    rescued_step = -1
    request = None
    hooks = ()  # those that wait for the next forward pass
    is_past_step = False
    rescuer = None
    excepthook = None
    busy = _thread.allocate_lock()


_now = _Training()


def arm(optimizers, folder):
    """Count steps from now on. `optimizers` is the module torch.optim.optimizer."""
    register = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register is not None:
        _now.folder = folder
        _now.hook = register(_after_step)


def _after_step(optimizer, args, kwargs):
    """Runs after every step of every optimizer: half a microsecond."""
    key = id(optimizer)
    if key not in _now.known or _now.pid != _getpid():
        # The others have stepped already in this round, which this one ends.
        _now.num_steps += not _now.known
        _meet(key)
    else:
        _now.since.add(key)
        if len(_now.since) < len(_now.known):
            _now.num_partial += 1
            if _now.num_partial < _MOST_PARTIAL:
                return
            _now.known = set(_now.since)  # the others have gone
        _now.num_steps += 1
    _now.since.clear()
    _now.num_partial = 0
    if _now.request is not None and not _now.is_past_step:
        _wait_for_forward(optimizer)


_after_step._torchdynamo_disable = True  # a compiled optimizer calls it, and does not trace into it


def _meet(key):
    try:
        if _now.pid != _getpid():
            if "jackline.session.run" in sys.modules:  # attached: it saves by itself
                _now.hook.remove()
                return
            _now.pid, _now.first_s, _now.ident = _getpid(), time.monotonic(), _ident()
            _now.busy, _now.request, _now.hooks = _thread.allocate_lock(), None, ()
            _open_door()
            _stand_by()
        _now.known.add(key)
    except Exception:
        pass


def _open_door():
    import fcntl

    path = os.path.join(_now.folder, f"ask.{_now.pid}")
    if os.path.exists(path):
        os.unlink(path)
    os.mkfifo(path, 0o600)
    low = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # for both, so that it never ends
    fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD)
    os.close(low)
    _thread.start_new_thread(_listen, (fd,))


def _stand_by():
    """Take the place of default actions only; what the script has set stays."""
    if _now.excepthook is None:
        _now.excepthook, sys.excepthook = sys.excepthook, _on_exception
        os.register_at_fork(after_in_child=_forget)
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
    except Exception:
        pass


# -- asked from outside ----------------------------------------------------------------------------------------------


def _listen(fd):
    rest = b""
    while True:
        try:
            rest += os.read(fd, 4096)
        except OSError:
            return
        *lines, rest = rest.split(b"\n")
        for line in lines:
            try:
                request = json.loads(line)
            except ValueError:
                continue
            with _now.busy:
                _answer(request)


def _answer(request):
    try:
        rescuer = _rescuer()
        rescuer.look()
        done, claim = _thread.allocate_lock(), _thread.allocate_lock()
        done.acquire()
        _now.is_past_step = False
        _now.request = {**request, "done": done, "claim": claim}
        is_over = done.acquire(True, float(request.get("wait_s", 10.0)))
        if not is_over and claim.acquire(False):
            _take_from_outside(rescuer, request)
        elif not is_over:
            done.acquire(True, _LONG_WAIT_S)  # the training's own thread is copying
        _now.request = None
        _end(rescuer, request, _LONG_WAIT_S)
    except Exception as problem:
        _now.request = None
        _note_failure(request, problem)


def _wait_for_forward(optimizer):
    """A step is over. Schedulers, averages and scalers are updated after it, so the copy is made when the next
    forward pass or the next step begins."""
    try:
        modules, optimizers = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
        _now.rescuer.note_random()
        _now.ident, _now.is_past_step = _ident(), True
        _now.hooks = (
            modules.register_module_forward_pre_hook(_before_forward),
            optimizers.register_optimizer_step_pre_hook(_before_forward),
        )
    except Exception:
        pass


def _before_forward(*args):
    """Before a forward pass (module, args), or before an optimizer step (optimizer, args, kwargs)."""
    if _ident() == _now.ident:
        _take_here(sys._getframe(1), "forward pass" if len(args) == 2 else "optimizer step")


_before_forward._torchdynamo_disable = True


def _take_here(frame, what):
    """In the training's own thread, between two steps."""
    request = _now.request
    try:
        _remove_hooks()
        if request is not None and request["claim"].acquire(False):
            try:
                _save(request, _scopes(frame), f"after step {_now.num_steps}, before the next {what}", True)
            finally:
                request["done"].release()
    except Exception:
        pass


def _remove_hooks():
    hooks, _now.hooks = _now.hooks, ()
    for hook in hooks:
        hook.remove()


def _take_from_outside(rescuer, request):
    """No boundary came in time: the training's thread waits for something, or its step is long."""
    from _jackline_inside import awaited  # not above: few processes come here

    is_past_step = _now.is_past_step
    _remove_hooks()
    frame = awaited.thread_frames().get(_now.ident)
    scopes = _scopes(frame, is_own_thread=False) if frame is not None else []
    if is_past_step:
        return _save(request, scopes, f"after step {_now.num_steps}", True)
    waited = f"no step ended within {float(request.get('wait_s', 10.0)):g} s"
    return _save(request, scopes, _apart(_listed(frame), waited), False)


def _apart(frames, why):
    """Words for a moment that is not between two steps."""
    codes = [frame.f_code for frame, _ in frames]
    if any("/torch/optim/" in code.co_filename and code.co_name == "step" for code in codes):
        return "not at a step boundary but inside the optimizer's step: weights may be half updated"
    return f"not at a step boundary ({why}): the weights are those after step {_now.num_steps}"


# -- the process ends ------------------------------------------------------------------------------------------------


def _on_exception(kind, value, trace):
    try:
        _now.excepthook(kind, value, trace)
    finally:
        if _now.pid == _getpid():
            cause = "interrupt" if issubclass(kind, KeyboardInterrupt) else "exception"
            cause = "oom" if kind.__name__ == "OutOfMemoryError" else cause
            _rescue_at_end(cause, _traced(trace), f"{kind.__name__} came")
            try:
                # Python ends by SIGINT if the text it ran last did, and a rescue runs others.
                if cause == "interrupt":
                    exec("raise KeyboardInterrupt")
            except KeyboardInterrupt:
                pass


def _traced(trace):
    """The frames of a traceback, innermost first, with the lines at which they were left."""
    frames = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1][:_MOST_FRAMES]


def _on_sigterm(number, frame):
    if _now.pid == _getpid():
        _rescue_at_end("sigterm", _listed(frame), "SIGTERM came")
    _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
    os.kill(os.getpid(), _signal.SIGTERM)


def _rescue_at_end(cause, frames, why):
    request = {"id": "", "cause": cause}
    wait_s = _LAST_WAIT_S.get(cause, _LONG_WAIT_S)
    try:
        if _now.rescued_step >= _now.num_steps or not _now.busy.acquire(True, wait_s):
            return
        _remove_hooks()
        rescuer = _rescuer()
        _save(request, _scopes_of(frames, slots_local), _apart(frames, why), False)
        _end(rescuer, request, wait_s)
    except BaseException as problem:  # a second Ctrl-C ends the rescue, not the traceback
        _note_failure(request, problem)


# -- saving ----------------------------------------------------------------------------------------------------------


def _rescuer(python=None):
    if _now.rescuer is None:
        _load_package()
        from jackline.checkpoint.rescue.take import Rescuer

        attempt, run = (os.path.normpath(os.path.join(_now.folder, up)) for up in ("..", "../../.."))
        _now.rescuer = Rescuer(run, attempt, python or os.environ.get("JACKLINE_PYTHON"))
    return _now.rescuer


def _load_package():
    """Jackline as it supervises this process, also where the script's own environment has none."""
    from importlib.util import module_from_spec, spec_from_file_location

    if "jackline" not in sys.modules:
        path = os.path.join(_PACKAGE, "__init__.py")
        spec = spec_from_file_location("jackline", path, submodule_search_locations=[_PACKAGE])
        sys.modules["jackline"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["jackline"])


def _save(request, scopes, text, is_boundary):
    facts = {
        **_named(request),
        "text": text,
        "is_boundary": is_boundary,
        "num_steps": _now.num_steps,
        "trained_s": time.monotonic() - _now.first_s,
        "is_asked": request.get("cause") == "asked",
    }
    _now.rescuer.save_plain(scopes, facts)


def _named(request):
    return {"id": str(request.get("id", "")), "cause": str(request.get("cause", ""))}


def _end(rescuer, request, wait_s):
    record = rescuer.finish(wait_s, is_last=not request.get("keep"))
    if record.outcome in ("saved", "writing") and record.is_boundary:
        _now.rescued_step = _now.num_steps


def _note_failure(request, problem):
    """A record by hand: the code that writes records may be what failed."""
    try:
        why = f"{type(problem).__name__}: {problem}"
        record = {**_named(request), "pid": _getpid(), "outcome": "failed", "why": why, "at_s": time.time()}
        path = os.path.join(os.path.dirname(_now.folder), f"rescue-{_getpid()}.json")
        with open(f"{path}.new", "w") as file:
            json.dump(record, file)
        os.rename(f"{path}.new", path)
    except Exception:
        pass


# -- variables of frames ---------------------------------------------------------------------------------------------


def _listed(frame):
    frames = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def _scopes(frame, is_own_thread=True):
    return _scopes_of(_listed(frame), slots_local if is_own_thread else _local_of_another)


def _scopes_of(frames, read):
    """[(file, function, line, names, is_own)], innermost first, without Jackline's own; the script's globals last."""
    found, seen = [], set()
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            continue
        is_module = not frame.f_code.co_flags & 0x1  # CO_OPTIMIZED
        if is_module:
            seen.add(id(frame.f_globals))
        names = dict(frame.f_globals) if is_module else read(frame)
        is_own = not (file.startswith((_LIBRARY, "<frozen")) or "-packages" in file)
        found.append((file, frame.f_code.co_name, line, names, is_own))
    main = sys.modules.get("__main__")
    if main is not None and id(main.__dict__) not in seen:
        found.append((str(getattr(main, "__file__", "")), "<module>", 0, dict(main.__dict__), True))
    return found


def slots_local(frame):
    """Variables of a frame of this thread, without side effects on it."""
    from _jackline_inside import slots

    names = slots.slot_names(frame.f_code)
    return {name: value for name in names if (value := slots.local(frame, name)) is not None}


def _local_of_another(frame):
    """Variables of a frame that another thread may be running: one call into C, during which it cannot run. Before
    Python 3.13 this leaves a dictionary with the frame, from which tensors are removed, so that none lives longer."""
    stored = frame.f_locals
    names = dict(stored)
    if sys.version_info < (3, 13):
        for name, value in names.items():
            if type(value).__name__ == "Tensor":
                stored.pop(name, None)
    return names

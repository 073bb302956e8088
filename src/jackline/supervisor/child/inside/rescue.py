# mypy: ignore-errors
"""Rescues the state of a training that never saved: when it is asked to, or when the process is about to end.

Loaded when torch's optimizers are imported (inject/sitecustomize.py). At the first backward pass or optimizer step it
makes a FIFO (JACKLINE_STACKS/ask.PID), at which a thread of its own sleeps, and stands by for the ways in which the
process can end (leaving.py). Saving itself is in `jackline.checkpoint.rescue`, which is imported only then.
Everything here fails open: the script's own result never depends on it.
"""

import _thread
import json
import os
import sys
import time

from _jackline_inside import scopes

_LOWEST_FD = 700
_MOST_PARTIAL = 64  # steps of some optimizers while another one, which has stepped before, does not
LONG_WAIT_S = 120.0
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
    autograd = None  # the module torch.autograd, until its first backward pass
    backward = None  # its function
    busy = _thread.allocate_lock()


_now = _Training()


def arm(optimizers, folder):
    """Count steps from now on. `optimizers` is the module torch.optim.optimizer."""
    register = getattr(optimizers, "register_optimizer_step_post_hook", None)
    if register is not None:
        _now.folder = folder
        _now.hook = register(_after_step)
        _now.autograd = sys.modules.get("torch.autograd")
        watch_backward()


def watch_backward():
    """A script may update its weights without an optimizer of torch: its first backward pass is noticed too."""
    if _now.autograd is not None and _now.autograd.backward is not _first_backward:
        _now.backward, _now.autograd.backward = _now.autograd.backward, _first_backward


def _first_backward(*args, **kwargs):
    if _now.autograd.backward is _first_backward:
        _now.autograd.backward = _now.backward
    if _now.pid != _getpid():
        _begin()
    try:
        return _now.backward(*args, **kwargs)
    except BaseException as problem:
        problem.__traceback__ = problem.__traceback__.tb_next  # without this frame, as if nobody had watched
        raise


_first_backward._torchdynamo_disable = True


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
        if not _now.known:
            _now.first_s, _now.ident = time.monotonic(), _ident()
        if _now.pid == _getpid() or _begin():
            _now.known.add(key)
    except Exception:
        pass


def _begin():
    """The first backward pass or step of this process."""
    try:
        if "jackline.session.run" in sys.modules:  # attached: it saves by itself
            _now.hook.remove()
            return False
        from _jackline_inside import leaving

        _now.pid, _now.first_s, _now.ident = _getpid(), time.monotonic(), _ident()
        _now.busy, _now.request, _now.hooks = _thread.allocate_lock(), None, ()
        _open_door()
        leaving.stand_by()
        return True
    except Exception:
        return False


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
                answer(request)


def answer(request):
    """Save when a step is over, or from here if none ends in time."""
    try:
        rescuer = rescuer_of()
        rescuer.look()
        done, claim = _thread.allocate_lock(), _thread.allocate_lock()
        done.acquire()
        _now.is_past_step = False
        _now.request = {**request, "done": done, "claim": claim}
        if not _now.known:  # nothing counts its steps: weights do not change while a forward pass begins
            rescuer.note_random()
            _hook_next()
        is_over = done.acquire(True, float(request.get("wait_s", 10.0)))
        if not is_over and claim.acquire(False):
            _take_from_outside(request)
        elif not is_over:
            done.acquire(True, LONG_WAIT_S)  # the training's own thread is copying
        _now.request = None
        end(rescuer, request, LONG_WAIT_S)
    except Exception as problem:
        _now.request = None
        note_failure(request, problem)


def _wait_for_forward(optimizer):
    """A step is over. Schedulers, averages and scalers are updated after it, so the copy is made when the next
    forward pass or the next step begins."""
    try:
        _now.rescuer.note_random()
        _now.ident, _now.is_past_step = _ident(), True
        _hook_next()
    except Exception:
        pass


def _hook_next():
    modules, optimizers = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    _now.hooks = (
        modules.register_module_forward_pre_hook(_before_forward),
        optimizers.register_optimizer_step_pre_hook(_before_forward),
    )


def _before_forward(*args):
    """Before a forward pass (module, args), or before an optimizer step (optimizer, args, kwargs)."""
    if _ident() == _now.ident:
        _take_here(sys._getframe(1), "forward pass" if len(args) == 2 else "optimizer step")


_before_forward._torchdynamo_disable = True


def _take_here(frame, what):
    """In the training's own thread, between two steps."""
    request = _now.request
    try:
        remove_hooks()
        if request is not None and request["claim"].acquire(False):
            try:
                after = f"after step {_now.num_steps}, " if _now.known else ""
                text = f"{after}before the next {what}"
                save(request, scopes.scopes(frame), text, True)
            finally:
                request["done"].release()
    except Exception:
        pass


def remove_hooks():
    hooks, _now.hooks = _now.hooks, ()
    for hook in hooks:
        hook.remove()


def _take_from_outside(request):
    """No boundary came in time: the training's thread waits for something, or its step is long."""
    from _jackline_inside import awaited  # not above: few processes come here

    is_past_step = _now.is_past_step
    remove_hooks()
    frame = awaited.thread_frames().get(_now.ident)
    found = scopes.scopes(frame, is_own_thread=False) if frame is not None else []
    if is_past_step:
        return save(request, found, f"after step {_now.num_steps}", True)
    awaited_for = "step ended" if _now.known else "forward pass began"
    waited = f"no {awaited_for} within {float(request.get('wait_s', 10.0)):g} s"
    return save(request, found, apart(scopes.listed(frame), waited), False)


def apart(frames, why):
    """Words for a moment that is not between two steps."""
    codes = [frame.f_code for frame, _ in frames]
    if any("/torch/optim/" in code.co_filename and code.co_name == "step" for code in codes):
        return "not at a step boundary but inside the optimizer's step: weights may be half updated"
    if not _now.known:
        return f"not at a step boundary ({why}): a weight may be half updated"
    return f"not at a step boundary ({why}): the weights are those after step {_now.num_steps}"


# -- saving ----------------------------------------------------------------------------------------------------------


def rescuer_of(python=None):
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
        path = os.path.join(scopes.PACKAGE, "__init__.py")
        spec = spec_from_file_location("jackline", path, submodule_search_locations=[scopes.PACKAGE])
        sys.modules["jackline"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["jackline"])


def save(request, found, text, is_boundary):
    facts = {
        **_named(request),
        "text": text,
        "is_boundary": is_boundary,
        "num_steps": _now.num_steps,
        "trained_s": time.monotonic() - _now.first_s,
        "is_asked": request.get("cause") == "asked",
        "is_counted": bool(_now.known),
    }
    _now.rescuer.save_plain(found, facts)


def _named(request):
    return {"id": str(request.get("id", "")), "cause": str(request.get("cause", ""))}


def end(rescuer, request, wait_s):
    record = rescuer.finish(wait_s, is_last=not request.get("keep"))
    if record.outcome in ("saved", "writing") and record.is_boundary:
        _now.rescued_step = _now.num_steps


def note_failure(request, problem):
    """A record by hand: the code that writes records may be what failed."""
    try:
        why = f"{type(problem).__name__}: {problem}"
        record = {**_named(request), "pid": _getpid(), "outcome": "failed", "why": why, "at_s": time.time()}
        path = os.path.join(os.path.dirname(_now.folder), f"rescue-{_getpid()}.json")
        _keep_saved(path)
        with open(f"{path}.new", "w") as file:
            json.dump(record, file)
        os.rename(f"{path}.new", path)
    except Exception:
        pass


def _keep_saved(path):
    """A failure does not take the place of a rescue that is on the disk (rundir/records/rescue)."""
    try:
        with open(path) as file:
            if json.load(file)["outcome"] == "saved":
                os.rename(path, f"{path[:-5]}.saved.json")
    except (OSError, ValueError, KeyError):
        pass

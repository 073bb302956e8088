# mypy: ignore-errors
"""Brings the rescue into a process that was started without Jackline, through Python 3.14's `sys.remote_exec`.

`join` runs in the process's main thread, between two of its instructions, and only starts a thread. That thread loads
what a rescue needs and opens the FIFO when it can be asked. No signal handler and no excepthook is set: the process
ends as it would have.
"""

import _thread
import os
import sys
import time

from _jackline_inside import rescue

_FIRST_STEP_S = 10.0


def join(folder, question, python):
    """`folder` is the attempt's folder for stacks, `python` the interpreter that has Jackline and writes."""
    _thread.start_new_thread(_prepare, (folder, question, python, _thread.get_ident()))


def _prepare(folder, question, python, main):
    now = rescue._now
    now.folder = folder
    try:
        optimizers = sys.modules.get("torch.optim.optimizer")
        if "jackline.session.run" in sys.modules:
            raise RuntimeError("it is attached: it saves its own checkpoints")
        if optimizers is None:
            raise RuntimeError("it has not imported torch: nothing trains in it yet")
        now.rescuer = None  # another run's, where it was asked before
        rescuer = rescue.rescuer_of(python)
        if now.hook is None:
            now.pid, now.first_s, now.ident = os.getpid(), time.monotonic(), main
            now.known, now.num_steps = rescuer.meet_late()
            rescue.arm(optimizers, folder)
        _find_round(now, optimizers)
        known, num_steps = rescuer.meet_late()
        now.known, now.num_steps = now.known | known, num_steps or now.num_steps
        rescue._open_door()
    except BaseException as problem:  # a thread of the user's process must not print a traceback
        rescue.note_failure({"id": question, "cause": "asked"}, problem)


class _Round:
    """Finds out which step is the first of a round of several optimizers: we may have come in the middle of one."""

    def __init__(self, now):
        self.now, self.last, self.seen, self.num_found = now, None, set(), 0

    def before_step(self, optimizer, args, kwargs):
        try:
            path, key = _path(sys._getframe(1)), id(optimizer)
            if self.last is not None and (_is_back(self.last, path) or (path == self.last and key in self.seen)):
                self.now.since.clear()
                self.seen.clear()
                self.num_found += 1
            self.last = path
            self.seen.add(key)
        except Exception:
            pass


_Round.before_step._torchdynamo_disable = True


def _find_round(now, optimizers):
    """Also waits for the first step: without one more optimizers may still be made."""
    found = _Round(now)
    hook = optimizers.register_optimizer_step_pre_hook(found.before_step)
    until_s = time.monotonic() + _FIRST_STEP_S
    while not found.num_found and time.monotonic() < until_s:
        time.sleep(0.02)
    hook.remove()


def _path(frame):
    """The lines that lead to a step, outermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def _is_back(before, after):
    """Whether the program went back to an earlier line in between: a loop has begun its next pass."""
    for (old, old_line), (new, line) in zip(before, after, strict=False):
        if old is not new:
            return False
        if old_line != line:
            return line < old_line
    return False

"""A stop request by signal: noted immediately, obeyed at the end of the step.

The first SIGTERM or Ctrl-C is a request: the loop saves at its next boundary and leaves by raising `Stopped`. A
second one acts immediately: KeyboardInterrupt, or `Stopped` on the spot. Children forked from here react as if these
handlers did not exist. Owns the handlers and restores the former ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from jackline.errors import EXIT_STOPPED

_NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C", signal.SIGUSR1: "SIGUSR1 (Slurm's warning)"}


class Stopped(SystemExit):
    """The run was asked to stop, and did; everything that could be saved is saved. Exits with code 75.

    Not an Exception: a loop that catches those to skip bad batches must not catch this.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(EXIT_STOPPED)
        self.text = text

    def __str__(self) -> str:
        return self.text


class Unsaved(Stopped):
    """Training is done, but its last state could not be saved. The run is not finished and can be resumed.

    `is_ours`: because of an error inside Jackline. It is recorded and not raised: the code behind the block may be
    all that saves the result, and a resume may meet the same error.
    """

    def __init__(self, text: str = "", *, is_ours: bool = False) -> None:
        super().__init__(text)
        self.is_ours = is_ours


class NoMoreWaiting(Exception):
    """Raised by a loader that waits for data when a stop was requested (`stop_when`); nothing was taken."""


class StopRequest:
    """Whether a stop was requested, by whom, and when (monotonic). `ask` requests it from inside the process."""

    def __init__(self) -> None:
        self.by = ""
        self.at_s = 0.0
        self.why_deaf = ""  # why signals are not handled
        self.is_shared = False  # one of several ranks: it counts once all of them know of it
        self.is_agreed = False
        self._pid = os.getpid()
        self._former: dict[int, Any] = {}

    @property
    def is_made(self) -> bool:
        return bool(self.by) and (self.is_agreed or not self.is_shared)

    def ask(self, by: str) -> None:
        if not self.by:
            self.by, self.at_s = by, time.monotonic()

    def listen(self) -> None:
        """From now on signals are stop requests. Only the main thread may call this."""
        for number in _NAMES:
            former = signal.getsignal(number)
            if former is signal.SIG_IGN:
                continue  # nohup, or a parent that ignores the signal on purpose
            if number == signal.SIGUSR1 and former is not signal.SIG_DFL:
                continue  # the program or its framework uses it
            try:
                signal.signal(number, self._on_signal)
            except ValueError:
                self.why_deaf = "this is not the main thread, so SIGTERM and Ctrl-C end it without a save"
                return
            self._former[number] = former

    def stop_listening(self) -> None:
        if os.getpid() != self._pid:
            return
        for number, former in self._former.items():
            with contextlib.suppress(ValueError, TypeError):
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, former)
        self._former = {}

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:
            _react_as_before(number, self._former.get(number), frame)
            return
        is_second = bool(self.by)
        self.ask(_NAMES[signal.Signals(number)])
        if not is_second:
            again = " (again: at once, unsaved)" if number == signal.SIGINT else ""
            # os.write: the signal may have arrived in the middle of a print, which must not be re-entered.
            _tell(f"[jackline] {self.by}: saving at the end of this step, then ending{again}\n")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif (
            number == signal.SIGTERM and not self.is_shared
        ):  # a launcher repeats the signal that its ranks have got already
            raise Stopped("asked twice: ended in the middle of a step")


def cause_of(error: BaseException | None) -> tuple[str, int]:
    """How leaving the block by `error` ends the attempt: the cause and the exit code."""
    if error is None:
        return "finished", 0
    if isinstance(error, Unsaved) and not error.is_ours:
        return "disk_full", int(error.code or 0)
    if isinstance(error, Stopped):
        return "stopped", int(error.code or 0)
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return ("finished" if not code else "exit_code"), code
    return "own_exception", 1


def _react_as_before(number: int, former: Callable[..., Any] | int | None, frame: Any) -> None:
    if number != signal.SIGTERM and _is_loader_worker():
        return  # a terminal sends Ctrl-C to workers too, Slurm its warning; the step to be finished needs them
    if callable(former):
        former(number, frame)
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _is_loader_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())

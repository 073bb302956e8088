"""What reaches a viewer from its person: signals, and what is typed.

Owns counting signals while a viewer runs, whose Ctrl-C is whose, and passing typed lines to a run with --tty. Does
not own what a signal means for the run (showing.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from jackline.cli.view.screen import Surface, is_tty
from jackline.rundir.access.writing import open_own_fifo
from jackline.rundir.layout import AttemptDir

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Counts signals while the context is entered. Outside of the main thread the counts stay zero."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminate = False
        self.hangup = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _WATCHED:
                # Under nohup SIGHUP is ignored on purpose.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        elif number == signal.SIGTERM:
            self.terminate = True
        else:
            self.hangup = True


def may_interrupt(surface: Surface) -> bool:
    """Ctrl-C at a terminal is for the run. A notebook's interrupt button or a script's signal is for the viewer."""
    return surface != "notebook" and any(is_tty(fd) for fd in (0, 1, 2))


class Keyboard:
    """With --tty: what the user types goes to the run's terminal, one line at a time."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._path = attempt.keyboard
        self._fd = -1

    def pass_on(self) -> None:
        with contextlib.suppress(OSError):
            if self._fd < 0:
                self._fd = open_own_fifo(self._path)
            # In the background a read from the terminal would suspend us (SIGTTIN).
            if os.tcgetpgrp(0) == os.getpgrp() and select.select([0], [], [], 0)[0]:
                os.write(self._fd, os.read(0, 4096) or b"\x04")


def keyboard_of(attempt: AttemptDir) -> Keyboard | None:
    return Keyboard(attempt) if is_tty(0) else None

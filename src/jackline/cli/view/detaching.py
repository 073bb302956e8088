"""Signals and keys of a viewer: noticed here, acted on between two looks.

Nothing is raised in the middle of a write: a torn line or a half-drawn bar would stay on the screen.
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
from jackline.rundir.layout import AttemptDir

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Counts what came in while it is entered. In a thread other than the main one it can only stay at zero."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminate = False
        self.hangup = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _WATCHED:
                # nohup has SIGHUP ignored for a reason.
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
    """Ctrl-C at a terminal means the run. A notebook's interrupt button, or a script's signal, means the viewer."""
    return surface != "notebook" and any(is_tty(fd) for fd in (0, 1, 2))


class Keyboard:
    """With --tty: what the person types goes to the run's terminal, a line at a time."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._path = attempt.keyboard
        self._fd = -1

    def pass_on(self) -> None:
        with contextlib.suppress(OSError):
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # In the background a read from the terminal would stop us.
            if os.tcgetpgrp(0) == os.getpgrp() and select.select([0], [], [], 0)[0]:
                os.write(self._fd, os.read(0, 4096) or b"\x04")


def keyboard_of(attempt: AttemptDir) -> Keyboard | None:
    return Keyboard(attempt) if is_tty(0) else None

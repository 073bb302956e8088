"""The owner's side of a mirror process: start it, restart it when it was killed, ask it for the last upload.

The owner is the checkpoint writer or the supervisor. It calls `tend` again and again; nothing here waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from jackline.checkpoint.mirror.engine import MirrorOptions
from jackline.checkpoint.writer.lock import read_work

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 300.0
IS_WELL_AFTER_S = 60.0  # a process that ran this long is restarted at once
STOPPED_LOOKS = 2  # a stopped process is woken when it was found stopped this often in a row
LOOK_EVERY_S = 2.0


class MirrorProcess:
    """One mirror process after another."""

    def __init__(
        self, command: Sequence[str], options: MirrorOptions, *, env: Mapping[str, str] | None = None
    ) -> None:
        self._command = list(command)
        self._options = options
        self._env = None if env is None else dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._fd: int | None = None
        self._started_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._not_before_s = 0.0
        self._asked = 0
        self._looked_s = 0.0
        self._stopped = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def fd(self) -> int | None:
        """A descriptor that becomes readable when the process exits; None when there is none."""
        return self._fd

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until `tend` should start another process; None while one runs."""
        return max(0.0, self._not_before_s - now_s) if self._process is None else None

    def tend(self, now_s: float) -> str:
        """Start the process if none runs. Returns why another one is started; '' when there is nothing to report."""
        why = self._reap(now_s)
        if self._process is None and now_s >= self._not_before_s:
            try:
                self._start(now_s)
            except OSError as problem:
                self._pause(now_s)
                why = f"its process cannot be started: {problem.strerror}"
        elif self._process is not None and now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._wake()
        return why

    def ask(self, number: int) -> None:
        """Ask for everything to be uploaded now; a later request has a larger number.

        mirror.json has the number in `answered` when that is done. A process that is started later is asked again.
        """
        if number > self._asked:
            self._asked = number
            self._write(f"{number}\n".encode())

    def let_go(self) -> None:
        """The owner exits; the process uploads what is left and exits by itself."""
        if self._process is not None and self._process.poll() is None:
            self._process.returncode = 0  # it keeps running on purpose; this avoids Python's warning
        self._close()

    def _start(self, now_s: float) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True, env=self._env)
        with contextlib.suppress(OSError):
            self._fd = os.pidfd_open(self._process.pid)
        self._started_s, self._stopped = now_s, 0
        self._write(self._options.to_line())
        if self._asked:
            self._write(f"{self._asked}\n".encode())

    def _reap(self, now_s: float) -> str:
        process = self._process
        if process is None or process.poll() is None:
            return ""
        self._close()
        self._process = None
        if now_s - self._started_s >= IS_WELL_AFTER_S:
            self._pause_s = FIRST_PAUSE_S
        self._pause(now_s)
        return f"its process {process.pid} {_ending(process.returncode)}"

    def _pause(self, now_s: float) -> None:
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    def _write(self, line: bytes) -> None:
        """To its standard input: a command line can be read by every user, and a URL may hold a password."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(line)
                self._process.stdin.flush()

    def _wake(self) -> None:
        """A stopped process would upload nothing for ever."""
        assert self._process is not None
        _, is_stopped = read_work(self._process.pid)
        self._stopped = self._stopped + 1 if is_stopped else 0
        if self._stopped >= STOPPED_LOOKS:
            with contextlib.suppress(OSError):
                os.kill(self._process.pid, signal.SIGCONT)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"

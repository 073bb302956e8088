"""One supervisor a run, held by the kernel and let go by it at any kind of death."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from jackline.rundir.layout import RunDir
from jackline.rundir.records.supervisor import read_supervisor

_LAST_WORK_S = 30.0  # of a supervisor that has written down its run's end: hooks


class RunLock:
    """An flock on the run's `lock` file. `fd`: a descriptor inherited from a process that holds it already."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self._path = path
        self._fd = fd

    @property
    def fd(self) -> int | None:
        """For a process that goes on holding it; None while it is not held."""
        return self._fd

    def try_acquire(self) -> bool:
        """True when this process now holds the run; False when somebody else does."""
        if self._fd is not None:
            return True
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def acquire_after_finished(lock: RunLock, run: RunDir) -> bool:
    """As try_acquire, but a supervisor whose run has ended is waited for: it may still be waiting for a hook."""
    until_s = time.monotonic() + _LAST_WORK_S
    while not lock.try_acquire():
        if not read_supervisor(run).is_finished or time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True

"""The lock that allows one supervisor per run; the kernel releases it however the process ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from jackline.rundir.layout import RunDir
from jackline.rundir.records.supervisor import read_supervisor

_LAST_WORK_S = 30.0  # time for the hooks of a supervisor that has already recorded its run's end


class RunLock:
    """An flock on the run's `lock` file. `fd`: a descriptor inherited from a process that already holds it."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self._path = path
        self._fd = fd

    @property
    def fd(self) -> int | None:
        """The descriptor, for a process that inherits the lock; None while it is not held."""
        return self._fd

    def try_acquire(self) -> bool:
        """True when this process now holds the lock; False when another process does."""
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
    """Like try_acquire, but waits for a supervisor whose run has ended: it may still be running a hook."""
    until_s = time.monotonic() + _LAST_WORK_S
    while not lock.try_acquire():
        if not read_supervisor(run).is_finished or time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True

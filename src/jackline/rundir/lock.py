"""The lock that allows one supervisor per run; the kernel releases it however the process ends.

On a file system without flock the file names its holder instead, and a holder counts as long as its process is alive
or, on another machine, as long as the run's heartbeat is fresh.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path

from jackline.rundir.access.reading import parse_json
from jackline.rundir.access.writing import open_own
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, identify, liveness

_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_OTHERS_WRITE_S = 0.2  # longer than another start needs between reading the holder and writing its own name
_BEAT_IS_FRESH_S = 30.0
_LAST_WORK_S = 30.0  # time for the hooks of a supervisor that has already recorded its run's end


class RunLock:
    """An flock on the run's `lock` file. `fd`: a descriptor inherited from a process that already holds it."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self._path = path
        self._fd = fd
        self._is_by_name = fd is not None and os.fstat(fd).st_size > 0
        if fd is not None and self._is_by_name:
            _write_holder(fd)  # we inherit it from a process that is about to exit

    @property
    def fd(self) -> int | None:
        """The descriptor, for a process that inherits the lock; None while it is not held."""
        return self._fd

    def try_acquire(self) -> bool:
        """True when this process now holds the lock; False when another process does."""
        if self._fd is not None:
            return True
        fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError as error:
            if error.errno not in _NO_FLOCK or not _take_by_name(fd, RunDir(self._path.parent)):
                os.close(fd)
                if error.errno in _NO_FLOCK:
                    return False
                raise
            self._is_by_name = True
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            if self._is_by_name and _read_holder(self._fd) == identify(os.getpid()):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None


def _take_by_name(fd: int, run: RunDir) -> bool:
    """Write our name into the lock file, unless its holder is alive. Of two that write at once, the last has it."""
    holder = _read_holder(fd)
    if holder is not None and holder != identify(os.getpid()):
        where = liveness(holder)
        from jackline.rundir.status import last_beat_s  # here, because a writer starts faster without its records

        beat_s = last_beat_s(run)
        if where == "alive" or (where == "elsewhere" and beat_s and abs(time.time() - beat_s) < _BEAT_IS_FRESH_S):
            return False
    _write_holder(fd)
    time.sleep(_OTHERS_WRITE_S)
    return _read_holder(fd) == identify(os.getpid())


def _read_holder(fd: int) -> ProcessId | None:
    try:
        value = parse_json(os.pread(fd, 4096, 0))
    except ValueError:
        return None
    # The lock of a `checkpoints` folder names its trainer too.
    return ProcessId.from_json(value.get("writer", value) if isinstance(value, dict) else value)


def _write_holder(fd: int) -> None:
    me = identify(os.getpid())
    if me is not None:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(me.to_json()).encode(), 0)


def acquire_after_finished(lock: RunLock, run: RunDir) -> bool:
    """Like try_acquire, but waits for a supervisor whose run has ended: it may still be running a hook."""
    from jackline.rundir.records.supervisor import read_supervisor

    until_s = time.monotonic() + _LAST_WORK_S
    while not lock.try_acquire():
        if not read_supervisor(run).is_finished or time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True

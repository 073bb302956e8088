"""Disk space for the child's output: what we reserve, and what we free first.

A child that prints to a full disk crashes. So its file always has some blocks allocated ahead of its end, our own
bytes are freed early, and a reserve file is deleted when even that is not enough. Owns: measuring free space, holes,
blocks ahead, the reserve. Does not own: reading the output (reader.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Literal

from jackline.immutable import immutable
from jackline.machine.disk import used_bytes
from jackline.rundir.access.writing import open_own

MIB = 1 << 20
AHEAD_BYTES = 16 * MIB
FIRST_AHEAD_BYTES = MIB // 4
_PAGE = 4096
_REMEMBERED = 64
_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02

Shortage = Literal["none", "low", "critical"]


@immutable
class Space:
    """Free and total bytes of the disk a file is on."""

    free_bytes: int
    total_bytes: int


def read_space(path: Path | int) -> Space | None:
    try:
        disk = os.statvfs(path)
    except OSError:
        return None
    return Space(disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)


def low_bytes(total_bytes: int) -> int:
    """Below this much free space, output that was already read is freed at once."""
    return min(max(256 * MIB, total_bytes // 50), total_bytes // 4)


def critical_bytes(total_bytes: int) -> int:
    """Below this, out.log is not written any more: the rest of the space is for the child."""
    return min(32 * MIB, total_bytes // 8)


class BudgetWatch:
    """Whether a run's folder has used up its disk budget but for a small rest. Measured every two seconds."""

    def __init__(self, folder: Path, budget_bytes: int | None) -> None:
        self._folder = folder
        self._budget = budget_bytes
        self._next_s = 0.0

    def poll(self, now_s: float) -> bool | None:
        """True when logs must wait, False when there is room. None: no budget, or it was measured just now."""
        if self._budget is None or now_s < self._next_s:
            return None
        self._next_s = now_s + 2.0
        return used_bytes(self._folder) > self._budget - critical_bytes(self._budget) // 4


def shortage(space: Space | None) -> Shortage:
    if space is None or space.total_bytes == 0:
        return "none"
    if space.free_bytes < critical_bytes(space.total_bytes):
        return "critical"
    return "low" if space.free_bytes < low_bytes(space.total_bytes) else "none"


def is_roomy(space: Space | None) -> bool:
    """Clearly enough space again. The limit differs from that of `shortage` so that the state does not flap."""
    return space is None or space.free_bytes > low_bytes(space.total_bytes) * 3 // 2


def make_reserve(path: Path, size: int = AHEAD_BYTES) -> int:
    """Allocate real blocks as a reserve, at most an eighth of the free space. Returns the bytes taken, or 0."""
    space = read_space(path.parent)
    if space is not None:
        size = min(size, space.free_bytes // 8)
    size -= size % _PAGE
    if size <= 0:
        return 0
    try:
        fd = open_own(path, os.O_WRONLY | os.O_CREAT)
        try:
            return size if _fallocate(fd, 0, 0, size) else 0
        finally:
            os.close(fd)
    except OSError:
        return 0


def begin_output(*paths: Path) -> None:
    """Make the files with blocks ahead: a command may fill the disk before its output was looked at once."""
    for path in paths:
        with contextlib.suppress(OSError):
            fd = open_own(path, os.O_WRONLY | os.O_CREAT)
            try:
                take_blocks_ahead(fd, 0, FIRST_AHEAD_BYTES)
            finally:
                os.close(fd)


def release_reserve(path: Path) -> bool:
    """Free the blocks; True when there were some."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def punch(fd: int, start: int, end: int) -> int:
    """Turn whole pages of [start, end) into a hole; return where the hole now ends (`start` when nothing was done).

    The file keeps its length, so whoever appends to it or reads it at an offset notices nothing.
    """
    end -= end % _PAGE
    if end <= start:
        return start
    return end if _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, start, end - start) else start


def take_blocks_ahead(fd: int, size: int, ahead_bytes: int) -> bool:
    """Give the file blocks beyond its end. An append that lands there cannot meet a full disk."""
    return _fallocate(fd, _KEEP_SIZE, size, ahead_bytes)


def first_data(fd: int, offset: int) -> int | None:
    """The first offset with data at or after `offset`; None when there is only a hole to the end."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        # ENXIO: only a hole from here to the end. Any other error: the file system does not support holes.
        return None if error.errno == errno.ENXIO else offset


class CutWatch:
    """Detects that another process truncated the file, even when it has grown again since: `> /dev/stderr` in a
    shell script reopens the file behind that descriptor and empties it."""

    def __init__(self) -> None:
        self._last = b""

    def note(self, data: bytes) -> None:
        """Remember the bytes that were just read."""
        self._last = (self._last + data[-_REMEMBERED:])[-_REMEMBERED:]

    def is_cut(self, fd: int, offset: int) -> bool:
        """Whether the bytes before `offset` differ from what was read there. A hole does not count: we made it."""
        if os.fstat(fd).st_size < offset:
            return True
        last = self._last[-offset:] if offset else b""
        now = os.pread(fd, len(last), offset - len(last)) if last else b""
        return now != last and bool(now.strip(b"\0"))


def empty_files(paths: list[Path]) -> None:
    """Free the contents of files that no process writes any more. Lengths are kept, so offsets stay valid."""
    for path in paths:
        with contextlib.suppress(OSError):
            fd = open_own(path, os.O_WRONLY)
            try:
                punch(fd, 0, os.fstat(fd).st_size + _PAGE)
            finally:
                os.close(fd)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> bool:
    if length <= 0:
        return False
    import ctypes  # importing it costs 5 ms, and callers that only read do not need it

    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return False
    done: int = call(ctypes.c_int(fd), ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(length))
    return done == 0

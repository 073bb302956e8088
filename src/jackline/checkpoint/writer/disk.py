"""Every call with which the checkpoint engine changes a disk, in one place.

Tests replace it with a disk that fails, crashes or records at any one of these calls, so the commit protocol is
tested against every fault in every position. Owns no decisions: commit.py decides what is called when.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

_FILE_MODE, _FOLDER_MODE = 0o644, 0o755
_SYNC_NOW = 1 | 2 | 4  # sync_file_range: wait before, write, wait after
_NO_PREALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class Disk:
    """The real disk. `is_direct` means bypassing the page cache: fast, and the token cache stays in memory."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(_FOLDER_MODE)

    def create(self, path: Path, *, is_direct: bool = False) -> int:
        """Create a new file; an existing one is an error and is never opened."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        if is_direct:
            flags |= os.O_DIRECT
        return os.open(path, flags, _FILE_MODE)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Allocate the space before the first byte, so that a full disk is noticed early.

        Not every file system supports it.
        """
        if size_bytes == 0:
            return
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as problem:
            if problem.errno not in _NO_PREALLOCATION:
                raise

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write as much of `data` at `offset` as the kernel takes; with O_DIRECT both must be multiples of 4096."""
        return os.pwrite(fd, data, offset)

    def write_back(self, fd: int, offset: int, length: int) -> None:
        """Write cached pages to the disk now, so that the cache does not fill with data that fsync must wait for.

        Its result matters: an error reported here is not reported again by the fsync.
        """
        function = _sync_file_range()
        if function is None or function(fd, offset, length, _SYNC_NOW) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
            raise OSError(number, os.strerror(number))

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Names are stored in the folder's own data, so a folder needs a sync of its own."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def delete_folder(self, path: Path) -> None:
        """Delete the folder as far as possible.

        What remains has a name that is never loaded, and deletion is tried again at the next start.
        """
        shutil.rmtree(path, ignore_errors=True)

    def free_bytes(self, path: Path) -> int:
        space = os.statvfs(path)
        return space.f_bavail * space.f_frsize


def can_write_directly(folder: Path) -> bool:
    """Whether O_DIRECT works here, tested by writing one page. Some FUSE mounts and old tmpfs refuse it."""
    probe = folder / f".tmp-probe-{os.getpid()}"
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, _FILE_MODE)
        try:
            return os.pwrite(fd, page, 0) == mmap.PAGESIZE
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        page.close()
        with contextlib.suppress(OSError):
            os.unlink(probe)


@functools.cache
def _sync_file_range() -> Any | None:
    """The system call that Python does not offer; None where the C library has none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function

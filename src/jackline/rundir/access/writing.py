"""Opens a file of a run for writing: only a plain file of our own, only for us to read, never through a link.

Somebody who can put a symbolic link, a FIFO or another user's file into a run's folder must not decide where our
bytes go. Owns that check and the modes of files and folders. Does not own what is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class NotOurs(OSError):
    """A file that must not be written: it is not plain, or belongs to another user."""


def open_own(path: str | os.PathLike[str], flags: int, mode: int = FILE_MODE) -> int:
    """A descriptor for writing. `flags` and `mode` as for os.open; a new file is private.

    Raises OSError for anything but a plain file that belongs to us, or to the owner of its folder.
    """
    is_cut = bool(flags & os.O_TRUNC)
    # Cut only after the check: with O_TRUNC a wrong file would be emptied before we have looked at it.
    fd = os.open(path, flags & ~os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, mode)
    try:
        _check(fd, path)
        os.set_blocking(fd, True)
        if is_cut:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_own_fifo(path: str | os.PathLike[str]) -> int:
    """The writing end of a FIFO that belongs to us. What a user types must not go anywhere else."""
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    found = os.fstat(fd)
    if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise NotOurs(errno.EPERM, "not a FIFO of our own", os.fspath(path))
    return fd


def make_private_folder(path: Path) -> None:
    """Make a folder that only we can enter. Folders above it are made like any other. Raises FileExistsError."""
    path.mkdir(FOLDER_MODE, parents=True)


def folder_inside(path: Path, only: str | None = None) -> Path:
    """A folder in a run's folder, made if it is absent. Raises NotOurs for a link in its place: what is written there
    would land where somebody else has chosen. `only`: the one file that may be in it already; all others are removed,
    for a folder that is handed to a library which would load them."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(FOLDER_MODE)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotOurs(errno.ENOTDIR, "not a folder of this run", str(path))
    for entry in path.iterdir() if only is not None else ():
        if entry.name == only or entry.name.startswith(f".{only}."):  # the second: another rank writes it now
            continue
        if entry.is_dir() and not entry.is_symlink():
            import shutil  # late: every command imports this module

            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    return path


def private_folder(path: Path) -> Path:
    """The folder, made if it is absent and closed to the group. Raises NotOurs when it belongs to somebody else, or
    when everybody may write to it."""
    with contextlib.suppress(FileExistsError):
        make_private_folder(path)
    me, link, found = os.geteuid(), path.lstat(), path.stat()
    if not stat.S_ISDIR(found.st_mode) or (link.st_uid, found.st_uid) != (me, me) or found.st_mode & stat.S_IWOTH:
        raise NotOurs(errno.EPERM, "not a folder of our own", str(path))
    if found.st_mode & stat.S_IWGRP:
        path.chmod(FOLDER_MODE)
    return path


def _check(fd: int, path: str | os.PathLike[str]) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs(errno.EINVAL, "not a plain file", os.fspath(path))
    if found.st_uid == os.geteuid():
        return
    # Some network file systems show every file as another user's. Then its folder is that user's, too.
    folder = os.stat(os.path.dirname(os.path.abspath(path)))  # noqa: PTH116, PTH100
    if found.st_uid != folder.st_uid:
        raise NotOurs(errno.EPERM, "it belongs to another user", os.fspath(path))

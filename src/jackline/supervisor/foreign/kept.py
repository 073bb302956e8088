"""Copies of the user's own good checkpoints in the run's folder `kept/`, made before a restart could overwrite them.

A hard link is not enough, because open(path, "wb") truncates the shared inode. So blocks are shared where the file
system supports it (reflink), and copied where it does not. At most two copies are kept, and a copy takes at most a
quarter of the free space. Owns `kept/`; seen.py decides which checkpoint is worth keeping.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from jackline.immutable import immutable
from jackline.rundir.atomic import remove_tree, sync_directory
from jackline.rundir.layout import RunDir
from jackline.rundir.records.foreign import Fingerprint
from jackline.supervisor.foreign.fingerprint import fingerprint
from jackline.units import format_bytes

MAX_KEPT = 2
FREE_SHARE = 4  # a copy may take at most 1/FREE_SHARE of the free space
TELL_EVERY_S = 2.0
_FICLONE = 0x40049409
_BLOCK_BYTES = 8 << 20

Tell = Callable[[str], None]


class NotKept(Exception):
    """Why no copy was made, as text for the user. The attempt starts anyway."""


@immutable
class Kept:
    """A finished copy; `is_shared` when it shares its blocks and took no extra space."""

    path: Path
    is_shared: bool


def keep_copy(run: RunDir, source: Path, wanted: Fingerprint, number: int, *, tell: Tell) -> Kept:
    """Copy `source` into kept/NNNN/. Raises NotKept when there is no room, or when the source changes meanwhile."""
    final = run.kept / f"{number:04d}"
    draft = run.kept / f".{number:04d}.draft"
    try:
        draft.mkdir(parents=True)
        is_shared = _Copying(source, wanted.size_bytes, tell).copy(draft / source.name)
        if not fingerprint(draft / source.name).is_same(wanted):
            raise NotKept(f"{source} changed while it was copied")
        draft.rename(final)
        sync_directory(run.kept)
    except OSError as error:
        raise NotKept(f"{source} could not be copied into {run.kept}: {error.strerror or error}") from None
    finally:
        remove_tree(draft)
    return Kept(final / source.name, is_shared)


def put_back(copy: Path, target: Path) -> Path | None:
    """Put a kept copy where the command looks. A file there is moved aside, never deleted; returns its new path."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    aside = None
    try:
        _Copying(copy, 0, lambda _: None).copy(draft)
        if os.path.lexists(target):
            number = next(n for n in range(1, 10_000) if not os.path.lexists(_aside_name(target, n)))
            aside = _aside_name(target, number)
            target.rename(aside)
        draft.rename(target)
        sync_directory(target.parent)
    except OSError:
        if aside is not None and not os.path.lexists(target):
            aside.rename(target)
        if draft.is_dir():
            remove_tree(draft)
        draft.unlink(missing_ok=True)
        raise
    return aside


def drop_old(run: RunDir, used: Path | None) -> None:
    """Delete all copies except the last two, and never the one that is about to be used."""
    try:
        found = sorted(path for path in run.kept.iterdir() if path.name.isdigit())
    except OSError:
        return
    for path in found[:-MAX_KEPT]:
        if used is None or used.parent != path:
            remove_tree(path)


def _aside_name(target: Path, number: int) -> Path:
    return target.with_name(f".{target.name}.set-aside-{number}")


class _Copying:
    """Copies one file or folder and keeps the times of its files."""

    def __init__(self, source: Path, total_bytes: int, tell: Tell) -> None:
        self._source = source
        self._total_bytes = total_bytes
        self._tell = tell
        self._done_bytes = 0
        self._is_room_checked = total_bytes == 0
        self._told_s = time.monotonic()
        self._is_shared = True

    def copy(self, target: Path) -> bool:
        """True when all blocks are shared."""
        if not self._source.is_dir():
            self._copy_file(self._source, target)
            return self._is_shared
        for root, folders, names in os.walk(self._source):
            inside = target / os.path.relpath(root, self._source)
            inside.mkdir(parents=True, exist_ok=True)
            folders.sort()
            for name in sorted(names):
                if (Path(root) / name).is_file():
                    self._copy_file(Path(root) / name, inside / name)
            sync_directory(inside)
        return self._is_shared

    def _copy_file(self, source: Path, target: Path) -> None:
        with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
            try:
                fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            except OSError:
                self._is_shared = False
                self._check_room(target.parent)
                while block := reader.read(_BLOCK_BYTES):
                    view = memoryview(block)
                    while view:
                        view = view[writer.write(view) :]
                    self._done_bytes += len(block)
                    self._say_how_far()
            found = os.fstat(reader.fileno())
            os.utime(writer.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(writer.fileno())

    def _check_room(self, folder: Path) -> None:
        if self._is_room_checked:
            return
        self._is_room_checked = True
        import shutil

        free_bytes = shutil.disk_usage(folder).free
        if self._total_bytes > free_bytes // FREE_SHARE:
            raise NotKept(
                f"a copy of {self._source} would take {format_bytes(self._total_bytes)} of "
                f"{format_bytes(free_bytes)} that are free; at most a quarter is used for that"
            )

    def _say_how_far(self) -> None:
        if self._total_bytes and time.monotonic() - self._told_s >= TELL_EVERY_S:
            self._told_s = time.monotonic()
            with contextlib.suppress(OSError):
                self._tell(
                    f"keeping a copy of {self._source}: "
                    f"{format_bytes(self._done_bytes)} of {format_bytes(self._total_bytes)}"
                )

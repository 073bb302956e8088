"""The order of writing that makes a checkpoint whole or absent, through kill -9 and power loss.

    temporary folder beside its final place -> every file: reserve, write and hash, cut to length, fsync
    -> manifest, fsync -> fsync folder -> rename -> fsync parent -> only now acknowledged

The rename alone protects against a killed process; the fsyncs protect against a crash of the machine. An error from
fsync means that the bytes are lost. It is never retried on the same file: the kernel may have marked the pages clean.
Owns that order. Does not own the calls (disk.py), who may write (serve.py) or what is kept (retention.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from jackline.checkpoint.format.catalogue import list_left_behind, list_names, list_rewinds
from jackline.checkpoint.format.hashing import CHUNK_BYTES, chunk_offsets, digest
from jackline.checkpoint.format.header import ALIGNMENT
from jackline.checkpoint.format.manifest import (
    DAMAGED,
    DELETED,
    MANIFEST,
    TEMPORARY,
    FileEntry,
    Manifest,
    Name,
    is_left_behind,
)
from jackline.checkpoint.writer.disk import Disk
from jackline.units import format_bytes

WRITE_THREADS = 4
RESERVE_BYTES = 64 << 20
FOLDER_BYTES = 64 << 10  # headers, manifest and file ends of a checkpoint


class Unacknowledged(OSError):
    """The folder has its final name, but may not survive a power cut: it must not count as saved."""


class DiskFull(OSError):
    """The disk is too full; found before anything was written."""

    def __init__(self, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{needed_bytes} bytes needed, {free_bytes} free")
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class OverBudget(OSError):
    """The run would take more of the disk than its budget; found before anything was written."""

    def __init__(self, needed_bytes: int, used_bytes: int, budget_bytes: int) -> None:
        needed, used, budget = map(format_bytes, (needed_bytes, used_bytes, budget_bytes))
        super().__init__(f"the disk budget of {budget} leaves no room: {needed} needed, {used} used by this run")
        self.needed_bytes = needed_bytes
        self.used_bytes = used_bytes
        self.budget_bytes = budget_bytes


@dataclass
class DraftFile:
    """One file of a checkpoint that is being written."""

    name: str
    size_bytes: int
    fd: int
    is_direct: bool
    chunks: list[str]
    is_open: bool = True


@dataclass
class Draft:
    """A checkpoint that is being written. It ends with `commit` or `discard`."""

    folder: Path
    name: Name
    algorithm: str
    disk: Disk
    is_direct: bool = False
    files: list[DraftFile] = field(default_factory=list)
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.folder / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}-{self.name}"
        self.disk.make_folder(self.path)

    def open_file(self, name: str, size_bytes: int, *, is_direct: bool | None = None) -> DraftFile:
        direct = self.is_direct if is_direct is None else is_direct
        fd = self.disk.create(self.path / name, is_direct=direct)
        file = DraftFile(name, size_bytes, fd, direct, [""] * len(chunk_offsets(size_bytes)))
        self.files.append(file)
        self.disk.reserve(fd, size_bytes)
        return file

    def write(self, file: DraftFile, data: memoryview, offset: int) -> None:
        """Write and hash some whole chunks. `data` may extend past the end of the file up to a page boundary.

        Several threads may write different chunks at once: then hashing and writing run in parallel.
        """
        for start in range(0, max(len(data), 1), CHUNK_BYTES):
            self._write_chunk(file, data[start : start + CHUNK_BYTES], offset + start)

    def finish_file(self, file: DraftFile) -> FileEntry:
        if not all(file.chunks):
            raise ValueError(f"{file.name} was not written whole")
        if file.is_direct and file.size_bytes % ALIGNMENT:
            self.disk.truncate(file.fd, file.size_bytes)
        self.disk.sync(file.fd)
        file.is_open = False
        self.disk.close(file.fd)
        return FileEntry(file.name, file.size_bytes, tuple(file.chunks))

    def add_small(self, name: str, data: bytes) -> FileEntry:
        """Add a file that is in memory and need not be fast."""
        file = self.open_file(name, len(data), is_direct=False)
        self.write(file, memoryview(data), 0)
        return self.finish_file(file)

    def commit(self, manifest: Manifest) -> Path:
        """Make it visible and durable; return its path. After an OSError before the rename, call discard."""
        self.add_small(MANIFEST, manifest.to_bytes())
        self.disk.sync_folder(self.path)
        final = free_place(self.folder, self.name)
        self.disk.rename(self.path, final)
        try:
            self.disk.sync_folder(self.folder)  # the rename is stored in the parent folder's data
        except OSError as problem:
            # The rename has happened. Repeating it would fail for ever; the folder is whole and may be loaded.
            raise Unacknowledged(
                problem.errno, f"{final.name} is written, but its folder could not be synced"
            ) from None
        return final

    def discard(self) -> None:
        """Drop the draft. What cannot be deleted now is deleted at the next start."""
        for file in self.files:
            if file.is_open:
                file.is_open = False
                _close_quietly(self.disk, file.fd)
        self.disk.delete_folder(self.path)

    def _write_chunk(self, file: DraftFile, data: memoryview, offset: int) -> None:
        inside = data[: max(0, min(CHUNK_BYTES, file.size_bytes - offset))]
        file.chunks[offset // CHUNK_BYTES] = digest(self.algorithm, inside)
        if file.is_direct:
            rest = data[: -(-len(inside) // ALIGNMENT) * ALIGNMENT]
        else:
            rest = inside
        position = offset
        while rest:
            written = self.disk.write(file.fd, rest, position)
            rest, position = rest[written:], position + written
        if not file.is_direct and inside:
            self.disk.write_back(file.fd, offset, len(inside))


def free_place(folder: Path, name: Name) -> Path:
    """The folder for this step. An existing folder is never replaced: the step gets a higher retry number.

    The number is higher than all that exist, because the highest counts as the newest; a lower one may be free where
    retention deleted it. A name that would count as left behind is not used either.
    """
    rewinds = list_rewinds(folder)
    taken = [other.retry for other in (*list_names(folder), *list_left_behind(folder)) if other.step == name.step]
    name = Name(name.step, max([name.retry, *(retry + 1 for retry in taken)]))
    while os.path.lexists(folder / str(name)) or is_left_behind(name, rewinds):
        name = Name(name.step, name.retry + 1)
    return folder / str(name)


def require_space(folder: Path, payload_bytes: int, disk: Disk) -> None:
    """Raise DiskFull unless the payload and a reserve fit."""
    needed = payload_bytes + payload_bytes // 20 + RESERVE_BYTES
    free = disk.free_bytes(folder)
    if free < needed:
        raise DiskFull(needed, free)


def require_budget(payload_bytes: int, used: int, budget_bytes: int) -> None:
    """Raise OverBudget unless the payload fits into the run's disk budget, with a share left for logs."""
    needed = payload_bytes + payload_bytes // 100 + FOLDER_BYTES
    if used + needed > budget_bytes - share_for_logs(budget_bytes):
        raise OverBudget(needed, used, budget_bytes)


def share_for_logs(budget_bytes: int) -> int:
    """The part of a run's disk budget that checkpoints leave to logs and records."""
    return min(64 << 20, budget_bytes // 8)


def delete_checkpoint(path: Path, disk: Disk) -> None:
    """Delete in two steps (rename, then remove), so that a half-deleted checkpoint never has a checkpoint's name."""
    gone = path.with_name(f"{DELETED}{secrets.token_hex(4)}-{path.name}")
    disk.rename(path, gone)
    disk.delete_folder(gone)


def set_aside(path: Path, disk: Disk) -> Path:
    """Rename a damaged checkpoint out of the way but keep it as evidence."""
    place = path.with_name(f"{DAMAGED}{path.name}-{secrets.token_hex(2)}")
    disk.rename(path, place)
    return place


def clear_leftovers(folder: Path, disk: Disk) -> list[str]:
    """Delete what a crashed writer left half-written or half-deleted.

    Only the holder of the writer's lock may call it.
    """
    found = sorted(path for path in folder.iterdir() if path.name.startswith((TEMPORARY, DELETED)))
    for path in found:
        if path.is_dir() and not path.is_symlink():
            disk.delete_folder(path)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in found]


def _close_quietly(disk: Disk, fd: int) -> None:
    with contextlib.suppress(OSError):
        disk.close(fd)

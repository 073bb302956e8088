"""Whether a checkpoint is whole: checks every length, every checksum and every header, and trusts nothing.

Bypasses the page cache where it can, because bytes that are still in memory say nothing about the disk.
Owns the judgement of one checkpoint. Does not own which one to load (catalogue.py) or the loading (restore.py).
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from jackline.checkpoint.format.hashing import CHUNK_BYTES, chunk_offsets, new_hash
from jackline.checkpoint.format.header import Header, header_length, parse_header
from jackline.checkpoint.format.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_SHOWN_STATE_BYTES,
    STATE,
    TENSORS,
    Damage,
    FileEntry,
    Manifest,
    Unreadable,
    is_cheap_to_parse,
    parse_json,
    parse_manifest,
    parse_name,
)
from jackline.checkpoint.format.parallel import run_in_threads
from jackline.rundir.access.reading import open_plain, read_whole
from jackline.units import format_bytes

VERIFY_THREADS = 2
SIP_BYTES = 2 << 20  # read in one call, then hashed while it is still in the core's own cache


class Interrupted(Exception):
    """The caller asked to stop before the check was complete; this says nothing about the checkpoint."""


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's folder, with its own checksum verified. Raises Damage when it cannot be used."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise Damage("it is not a folder")
        data = _read_small(path / MANIFEST, MAX_MANIFEST_BYTES)
    except OSError as problem:
        raise Damage(f"{MANIFEST} cannot be read: {problem.strerror}") from None
    return parse_manifest(data, name=parse_name(path.name))


def check_sizes(path: Path, manifest: Manifest) -> None:
    """The cheap half: every file exists, is a plain file and has the length in the manifest."""
    for entry in manifest.files:
        try:
            found = (path / entry.name).lstat()
        except OSError as problem:
            raise Damage(f"{entry.name} cannot be read: {problem.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise Damage(f"{entry.name} is not a plain file")
        if found.st_size != entry.size_bytes:
            raise Damage(
                f"{entry.name} is {_exact(found.st_size, entry.size_bytes)}, "
                f"the manifest says {_exact(entry.size_bytes, found.st_size)}"
            )


def verify_checkpoint(
    path: Path,
    *,
    is_direct: bool = True,
    threads: int = VERIFY_THREADS,
    should_stop: Callable[[], bool] | None = None,
) -> Manifest:
    """Read every byte.

    Returns the manifest of a whole checkpoint; otherwise raises Damage that names what is wrong.
    """
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    for entry in manifest.files:
        _check_chunks(path / entry.name, entry, manifest.algorithm, is_direct, (threads, should_stop))
    for entry in manifest.files:
        check_structure(path, entry)
    return manifest


def verify_file(path: Path, entry: FileEntry, algorithm: str) -> None:
    """Read one file whole; raises Damage where it is not the one in the manifest."""
    if path.stat().st_size != entry.size_bytes:
        raise Damage(f"{entry.name} is {_exact(path.stat().st_size, entry.size_bytes)}, not as long as it was")
    _check_chunks(path, entry, algorithm, False, (VERIFY_THREADS, None))
    check_structure(path.parent, entry)


def check_structure(path: Path, entry: FileEntry) -> None:
    """A right checksum only shows that nothing changed; the contents must also make sense."""
    if entry.name.endswith(TENSORS):
        read_header(path / entry.name, entry.size_bytes)
    elif entry.name == STATE and entry.size_bytes <= MAX_SHOWN_STATE_BYTES:
        data = _read_small(path / STATE, MAX_SHOWN_STATE_BYTES)
        if is_cheap_to_parse(data):  # a larger one is parsed by the training alone, when it resumes
            parse_json(data, STATE)


def read_header(path: Path, size_bytes: int) -> Header:
    """The header of a tensor file: which tensors it holds. The tensors are not read."""
    with open(open_to_read(path), "rb") as file:
        first = file.read(8)
        length = header_length(first, size_bytes, path.name)
        return parse_header(first + file.read(length - 8), size_bytes, path.name)


def open_to_read(path: Path, *, is_direct: bool = False) -> int:
    """Open a plain file of ours; a symbolic link is not followed."""
    if is_direct:
        try:
            return open_plain(path, os.O_DIRECT)
        except OSError:  # tmpfs and FUSE refuse O_DIRECT: read through the page cache
            pass
    return open_plain(path)


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` up to the file's end; return how many bytes were read."""
    total = 0
    while total < len(buffer):
        got = os.preadv(fd, [buffer[total:]], offset + total)
        if got == 0:
            break
        total += got
        if total % mmap.PAGESIZE:
            break  # end of file; another O_DIRECT read would start off a page boundary
    return total


def _check_chunks(
    path: Path, entry: FileEntry, algorithm: str, is_direct: bool, how: tuple[int, Callable[[], bool] | None]
) -> None:
    threads, should_stop = how
    own = threading.local()
    fd = open_to_read(path, is_direct=is_direct)
    try:

        def check(start: int) -> None:
            if should_stop is not None and should_stop():
                raise Interrupted
            if not hasattr(own, "buffer"):
                own.buffer = memoryview(mmap.mmap(-1, SIP_BYTES))  # page-aligned, as O_DIRECT needs it
            length = min(CHUNK_BYTES, entry.size_bytes - start)
            running = new_hash(algorithm)
            for offset in range(start, start + length, SIP_BYTES):
                try:
                    got = read_into(fd, own.buffer, offset)
                except OSError as problem:
                    at = format_bytes(start)
                    raise Unreadable(f"{entry.name} cannot be read at {at}: {problem.strerror}") from None
                running.update(own.buffer[: min(got, start + length - offset)])
            if running.hexdigest() != entry.chunks[start // CHUNK_BYTES]:
                raise wrong_chunk(entry.name, start, length)

        run_in_threads(check, list(chunk_offsets(entry.size_bytes)), threads)
    finally:
        os.close(fd)


def wrong_chunk(name: str, start: int, length: int) -> Damage:
    return Damage(f"{name} has wrong bytes between {format_bytes(start)} and {format_bytes(start + length)}")


def _read_small(path: Path, limit: int) -> bytes:
    try:
        return read_whole(path, limit)
    except OSError as problem:
        if problem.errno != errno.EFBIG:
            raise
        raise Damage(f"{path.name} is larger than {format_bytes(limit)}") from None


def _exact(size: int, other: int) -> str:
    """The size in readable form, but never the same text for two different lengths."""
    return format_bytes(size) if format_bytes(size) != format_bytes(other) else f"{size} bytes"

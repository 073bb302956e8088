"""Reads a file's bytes: through the page cache where they are cached, otherwise bypassing it.

A checkpoint is written past the page cache, so after a crash or on a new machine it is not cached. Then four threads
with 2 MiB each, bypassing the cache, get 3.3 GB/s from a disk of which a memory map gets 1.3 and reads through the
cache 1.0 to 1.7. A copy from a small buffer that is still in the processor's cache costs little compared with a disk.
Owns the choice of how to read, and its errors. Does not know what the bytes are (read.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from jackline.checkpoint.format.manifest import Damage
from jackline.checkpoint.format.verify import SIP_BYTES, open_to_read, read_into

DISK_THREADS = 4  # whatever the number of cores: these threads mostly wait
# This much stays in a core's own cache until it is hashed. A map of the file instead of reads was no faster (6-7 GB/s
# on two cores either way, against 9 to 10 for a copy without verification), and a disk error under a map kills the
# process.
_CACHED_SIP_BYTES = 512 << 10
_MAX_PIECES = 512  # the kernel accepts 1024 in one call
# To ask for every page of 16 MiB took a tenth of the time of a load from the page cache.
_LOOKS, _LOOKED_AT_BYTES = 8, 64 << 10


class Source:
    """One open file. Several threads may read it; errors call it `name`."""

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._own = threading.local()
        self._cached = open_to_read(path)
        self._direct: int | None = None
        self._is_refused = False
        with contextlib.suppress(OSError):  # tmpfs and FUSE refuse O_DIRECT: read through the cache
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
        os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def is_on_disk(self, start: int, end: int) -> bool:
        """Whether most of these bytes are not in the page cache and can be read past it.

        `start` must be page-aligned.
        """
        if self._direct is None or self._is_refused or end <= start:
            return False
        return _cached_share(self._cached, start, end - start) < 0.5

    @staticmethod
    def sip_bytes(is_on_disk: bool) -> int:
        """How much to read before it is hashed. A multiple of the page size."""
        return SIP_BYTES if is_on_disk else _CACHED_SIP_BYTES

    def read(self, pieces: Sequence[memoryview], offset: int, *, is_on_disk: bool) -> Sequence[memoryview]:
        """Fill the pieces, one after another; return the same bytes from where they are fastest to read."""
        if is_on_disk and self._direct is not None:
            try:
                return self._read_past(self._direct, pieces, offset)
            except OSError as problem:
                if problem.errno != errno.EINVAL:
                    raise Damage(f"{self._name} cannot be read at {offset} bytes: {problem.strerror}") from None
                self._is_refused = True  # the file could be opened with O_DIRECT but not read
        self._read_through(pieces, offset)
        return pieces

    def read_hashed(self, pieces: Sequence[memoryview], offset: int, update: Callable[[memoryview], None]) -> None:
        """Fill a few large pieces through the page cache; hand each part on while the processor's cache has it."""
        for piece in pieces:
            for start in range(0, len(piece), _CACHED_SIP_BYTES):
                part = piece[start : start + _CACHED_SIP_BYTES]
                self._read_through((part,), offset)
                update(part)
                offset += len(part)

    def _read_past(self, fd: int, pieces: Sequence[memoryview], offset: int) -> list[memoryview]:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, SIP_BYTES))  # page-aligned, as O_DIRECT needs it
        buffer: memoryview = self._own.buffer
        size = sum(len(piece) for piece in pieces)
        got = read_into(fd, buffer[: -(-size // mmap.PAGESIZE) * mmap.PAGESIZE], offset)
        if got < size:
            raise Damage(f"{self._name} ends at {offset + got} bytes")
        address, done = ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer)), 0
        for piece in pieces:
            to = ctypes.addressof(ctypes.c_ubyte.from_buffer(piece))
            ctypes.memmove(to, address + done, len(piece))  # releases the GIL; a slice assignment does not
            done += len(piece)
        return [buffer[:size]]

    def _read_through(self, pieces: Sequence[memoryview], offset: int) -> None:
        waiting = list(pieces)
        try:
            if len(waiting) == 1 and os.preadv(self._cached, waiting, offset) == len(waiting[0]):
                return
            while waiting:
                got = os.preadv(self._cached, waiting[:_MAX_PIECES], offset)
                if got == 0:
                    raise Damage(f"{self._name} ends at {offset} bytes")
                offset += got
                while waiting and got >= len(waiting[0]):
                    got -= len(waiting.pop(0))
                if got:
                    waiting[0] = waiting[0][got:]
        except OSError as problem:
            raise Damage(f"{self._name} cannot be read at {offset} bytes: {problem.strerror}") from None


def _cached_share(fd: int, start: int, length: int) -> float:
    """The share of that part of a file that is in the page cache, by a few looks at it; 1 where the kernel does not
    say.

    A read that must not wait (RWF_NOWAIT) is no alternative: newer kernels then read ahead, and the next call would
    see the data as cached.
    """
    try:
        view = mmap.mmap(fd, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
        first = ctypes.c_ubyte.from_buffer(view)
        begin, found, failed = ctypes.addressof(first), b"", 0
        for at, size in _looks(length):
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            failed |= _libc().mincore(ctypes.c_void_p(begin + at), ctypes.c_size_t(size), pages)
            found += bytes(pages)
        del first
        view.close()
    except (OSError, ValueError, AttributeError):
        return 1.0
    return 1.0 if failed else 1 - found.count(0) / len(found)


def _looks(length: int) -> list[tuple[int, int]]:
    """Where to look at so many bytes, evenly from the first to the last, and how many bytes at each place."""
    if length <= _LOOKS * _LOOKED_AT_BYTES:
        return [(0, length)]
    pages = (length - _LOOKED_AT_BYTES) // mmap.PAGESIZE
    return [(pages * number // (_LOOKS - 1) * mmap.PAGESIZE, _LOOKED_AT_BYTES) for number in range(_LOOKS)]


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)

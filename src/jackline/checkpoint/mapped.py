"""A file as memory, for the parts of it that are in the page cache already.

Copying from there is up to twice as fast as reading (10 against 5 to 7 GB/s here): the kernel's own copy does not use
the wide registers. Only what the kernel says is in memory is taken this way, because a disk that fails under a map
ends the process, while a failed read is an error with a name. Owns the map; whoever reads decides what is whole.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

_PAGE = mmap.PAGESIZE
_libc: Any = ctypes.CDLL(None, use_errno=True)


class Mapped:
    """Of an open file; where it cannot be mapped nothing is cached."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._map: mmap.mmap | None = None
        self._bytes: Any = None
        try:
            # Private and writable only so that its address may be asked for; nothing is written.
            self._map = mmap.mmap(fd, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            self._bytes = (ctypes.c_ubyte * size_bytes).from_buffer(self._map)
        except (OSError, ValueError, OverflowError):
            self.close()

    def is_cached(self, start: int, end: int) -> bool:
        """Whether all of [start, end) is in memory now."""
        if self._bytes is None or end > self._size_bytes or start % _PAGE:
            return False
        pages = -(-(end - start) // _PAGE)
        seen = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(ctypes.addressof(self._bytes) + start)
        if _libc.mincore(address, ctypes.c_size_t(end - start), seen) != 0:
            return False
        return all(one & 1 for one in bytes(seen))

    def copy(self, start: int, piece: memoryview) -> None:
        """Fills `piece` with the bytes from `start` on."""
        target = (ctypes.c_ubyte * len(piece)).from_buffer(piece)
        ctypes.memmove(target, ctypes.addressof(self._bytes) + start, len(piece))

    def close(self) -> None:
        self._bytes = None
        if self._map is not None:
            self._map.close()
            self._map = None

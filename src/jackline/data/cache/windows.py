"""Reads windows of tokens from era files, by positioned reads into one buffer.

Owns the open files. It uses `preadv` and not a memory map: the touched pages of a map count as this process's memory
and look like a leak, and a map is slower here (measured: 361 against 275 thousand windows a second).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jackline.data.cache.directory import Cache, era_path
from jackline.errors import JacklineError

_MAX_OPEN = 8


class EraFiles:
    """Open era files of one reader; used by one thread at a time."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._fds: OrderedDict[int, int] = OrderedDict()

    def fd(self, era: int) -> int:
        if era not in self._fds:
            while len(self._fds) >= _MAX_OPEN:
                os.close(self._fds.popitem(last=False)[1])
            self._fds[era] = self._open(era)
        self._fds.move_to_end(era)
        return self._fds[era]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _open(self, era: int) -> int:
        path = era_path(self._cache.folder, era)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        wanted = (self._cache.num_tokens(era) or 0) * self._cache.meta.dtype.itemsize
        found = os.fstat(fd).st_size
        if found != wanted:
            os.close(fd)
            raise JacklineError(
                f"{path} is {found} bytes long, the ledger says {wanted}",
                hint="remove that file; it is built again from the source",
            )
        # Windows are read in random order: read-ahead would fetch bytes that are not needed.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fd


def read_windows(fd: int, starts: NDArray[Any], out: NDArray[Any]) -> None:
    """Row i of `out` becomes the tokens from `starts[i]` on."""
    num_bytes = out.shape[1] * out.itemsize
    rows = out.view(np.uint8).reshape(-1).data
    preadv = os.preadv
    at = 0
    for offset in (starts * np.uint64(out.itemsize)).tolist():
        row = rows[at : at + num_bytes]
        if preadv(fd, (row,), offset) != num_bytes:
            _read_slowly(fd, row, offset)
        at += num_bytes


def _read_slowly(fd: int, row: memoryview, offset: int) -> None:
    """Read the row in several calls: a short read is legal, the end of the file inside the row is not."""
    while row:
        count = os.preadv(fd, (row,), offset)
        if count == 0:
            raise JacklineError(f"a token file ends at byte {offset}, in the middle of a window")
        row, offset = row[count:], offset + count

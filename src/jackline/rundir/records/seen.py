"""seen-RANK.bin: checksums of the last batches that an attached loop was given.

A run that was killed reads the batches since its last checkpoint again and compares them. Each batch has a fixed
place (its number modulo the number of entries), so the file has one size. It is mapped into memory, where a write
survives a kill. An entry that is torn, or was never written, does not count.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jackline.rundir.access.reading import read_part
from jackline.rundir.access.writing import open_own

NUM_ENTRIES = 4096
_FIELDS = struct.Struct("<QII")
_ENTRY = struct.Struct("<QIII")  # the fields, and the CRC-32 of their bytes


@dataclass(frozen=True)
class SeenBatch:
    """`number` counts the batches of the run from 0; `step`: steps done before it."""

    number: int
    step: int
    checksum: int


class SeenWriter:
    """Writes entries in about a microsecond each. Raises OSError when the file cannot be made."""

    def __init__(self, path: Path) -> None:
        size = NUM_ENTRIES * _ENTRY.size
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(fd, 0, size)  # a full disk is found here, and not by a signal at the first write
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def write(self, entry: SeenBatch) -> None:
        fields = _FIELDS.pack(entry.number, entry.step & 0xFFFFFFFF, entry.checksum)
        place = entry.number % NUM_ENTRIES * _ENTRY.size
        self._memory[place : place + _ENTRY.size] = fields + struct.pack("<I", zlib.crc32(fields))

    def close(self) -> None:
        self._memory.close()


def read_seen(path: Path) -> dict[int, SeenBatch]:
    """The whole entries, by number. Empty when there is no file."""
    with contextlib.suppress(OSError):
        return {entry.number: entry for entry in _entries(read_part(path, 0, NUM_ENTRIES * _ENTRY.size))}
    return {}


def _entries(data: bytes) -> Iterator[SeenBatch]:
    whole = len(data) - len(data) % _ENTRY.size
    for number, step, checksum, crc in _ENTRY.iter_unpack(data[:whole]):
        if crc == zlib.crc32(_FIELDS.pack(number, step, checksum)):
            yield SeenBatch(number, step, checksum)

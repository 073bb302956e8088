"""Batches of an attached loop: seen-RANK.bin has checksums of the last ones, skipped-batches.json those left out.

A run that was killed reads the batches since its last checkpoint again and compares them. Each batch has a fixed
place (its number modulo the number of entries), so the file has one size. It is mapped into memory, where a write
survives a kill. An entry that is torn, or was never written, does not count.

Skipped batches (`jackline resume --skip-batches A:B`) are counted over the whole run, the first is 0, as checkpoints
count them. That list only grows: an attempt that resumes before such batches leaves them out again, so the order is
the same however often the run is restarted.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jackline.errors import UsageError
from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.access.reading import read_part
from jackline.rundir.access.writing import open_own
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import decode, each, encode

NUM_ENTRIES = 4096
MAX_RANGES = 100
_FIELDS = struct.Struct("<QII")
_ENTRY = struct.Struct("<QIII")  # the fields, and the CRC-32 of their bytes


@immutable
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


@immutable
class Skip:
    """Batches `first` up to `end`, without `end`. `step`: the checkpoint that was gone back to, if one was.

    `why`: the loss that `on_spike=rewind` found; None for `--skip-batches`.
    """

    first: int | None = None
    end: int | None = None
    at_s: float | None = None
    step: str | None = None
    why: str | None = None

    @staticmethod
    def from_json(raw: object) -> Skip:
        return decode(Skip, raw)

    def covers(self, number: int) -> bool:
        return self.first is not None and self.end is not None and self.first <= number < self.end

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"


@immutable
class SkippedBatches:
    ranges: tuple[Skip, ...] = ()

    @staticmethod
    def from_json(raw: object) -> SkippedBatches:
        found = decode(SkippedBatches, raw, {"tuple[Skip, ...]": each(Skip.from_json)})
        known = [skip for skip in found.ranges if skip.first is not None and skip.end is not None]
        return SkippedBatches(tuple(known[:MAX_RANGES]))

    def to_json(self) -> dict[str, Any]:
        return encode(self)

    def covers(self, number: int) -> bool:
        return any(skip.covers(number) for skip in self.ranges)

    @property
    def first(self) -> int | None:
        """The first batch that is left out."""
        return min((skip.first for skip in self.ranges if skip.first is not None), default=None)

    @property
    def rewinds(self) -> tuple[Skip, ...]:
        """Those that `on_spike=rewind` left out."""
        return tuple(skip for skip in self.ranges if skip.why)

    @property
    def origin(self) -> str:
        """Who left them out."""
        words = ["--skip-batches"] if len(self.rewinds) < len(self.ranges) else []
        return ", ".join([*words, *(f"on_spike: {skip.why}" for skip in self.rewinds)])

    def origin_of(self, number: int) -> str:
        by_spike = any(skip.covers(number) and skip.why for skip in self.ranges)
        return "on_spike=rewind" if by_spike else "`resume --skip-batches`"

    def __str__(self) -> str:
        return ", ".join(map(str, self.ranges))


def read_skipped(run: RunDir) -> SkippedBatches:
    return SkippedBatches.from_json(atomic.read_json(run.skipped_file))


def batches_in(checkpoint: Path) -> int | None:
    """How many batches of the run the weights of a checkpoint were trained on: those cannot be left out any more."""
    state = atomic.read_json(checkpoint / "state.json")
    session = state.get("session") if isinstance(state, dict) else None
    found = session.get("batches") if isinstance(session, dict) else None
    return found if isinstance(found, int) else None


def parse_skip(text: str) -> Skip:
    """'120:140' are the batches 120 to 139 of the run; the first batch is 0."""
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(
            f"--skip-batches {text!r} is no range of batches",
            hint="120:140 leaves out the batches 120 to 139 of the run; its first batch is 0",
        )
    return Skip(int(match[1]), int(match[2]))


def add_skip(run: RunDir, skip: Skip, step: str | None) -> SkippedBatches:
    """Write it down, durably, before the attempt starts that will leave them out."""
    known = read_skipped(run)
    if len(known.ranges) >= MAX_RANGES:
        raise UsageError(f"run '{run.name}' leaves out {MAX_RANGES} ranges of batches already")
    whole = SkippedBatches((*known.ranges, Skip(skip.first, skip.end, time.time(), step, skip.why)))
    atomic.write_json(run.skipped_file, whole.to_json(), durable=True)
    return whole

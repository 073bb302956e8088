"""Append-only files with one JSON object per line: events and metrics.

Owns: appending whole lines, removing an incomplete last line, reading only whole lines.
Does not own: what the lines mean.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from jackline.immutable import immutable
from jackline.rundir.access.reading import parse_json, read_part
from jackline.rundir.access.writing import open_own

MAX_LINE_BYTES = 1 << 20
_BLOCK = 1 << 16
_MAX_LAST_BYTES = 32 << 20  # `read_last` looks no further back: a longer stretch without lines is damage
_TAIL_BYTES = 1 << 20


class JsonlWriter:
    """The only writer of one file. A line that could not be written completely is removed again."""

    def __init__(self, path: Path) -> None:
        self._fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        heal(self._fd)

    def append(self, record: dict[str, Any]) -> bool:
        """Append one line with a single write. False when the disk refuses it; then no partial line remains."""
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str)
        line = text.encode("utf-8", "surrogateescape") + b"\n"
        try:
            written = os.write(self._fd, line)
        except OSError:
            return False
        if written == len(line):
            return True
        with contextlib.suppress(OSError):  # else the next reader heals the file
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
        return False

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


@immutable
class Lines:
    """What was read: complete records, the offset to continue at, and how many lines were not JSON."""

    records: tuple[dict[str, Any], ...]
    next_offset: int
    num_damaged: int


def heal(fd: int) -> int:
    """Remove an incomplete last line; return how many bytes it had. Only the file's writer may call this."""
    size = os.fstat(fd).st_size
    end = _end_of_last_line(fd, size)
    if end < size:
        os.ftruncate(fd, end)
    return size - end


def read_lines(path: Path, offset: int = 0, *, max_bytes: int = 64 << 20) -> Lines:
    """Complete records from `offset` on; none if the file is absent. An incomplete last line is left for later."""
    try:
        data = read_part(path, offset, max_bytes)
    except OSError:
        return Lines((), offset, 0)
    end = data.rfind(b"\n") + 1
    if end == 0 and len(data) >= max_bytes:
        end = len(data)  # one very long line: skip it instead of reading it again and again
    records: list[dict[str, Any]] = []
    num_damaged = 0
    for line in data[:end].split(b"\n"):
        if not line:
            continue
        record = _parse(line)
        if record is None:
            num_damaged += 1
        else:
            records.append(record)
    return Lines(tuple(records), offset + end, num_damaged)


def end_of(path: Path) -> int:
    """The offset behind the last complete line, for a reader that wants only what comes; a long file is not read."""
    try:
        size = path.stat().st_size
        start = max(0, size - _TAIL_BYTES)
        found = read_part(path, start, _TAIL_BYTES).rfind(b"\n")
    except OSError:
        return 0
    return start + found + 1 if found >= 0 else size if start else 0


def read_last(path: Path, count: int) -> tuple[dict[str, Any], ...]:
    """The last `count` complete records, without reading the whole file."""
    try:
        size = path.stat().st_size
    except OSError:
        return ()
    span = _BLOCK
    while True:
        start = max(0, size - span)
        lines = read_lines(path, start)
        records = lines.records[-count:]
        if len(records) == count or start == 0 or span >= _MAX_LAST_BYTES:
            return records
        span *= 8


def _parse(line: bytes) -> dict[str, Any] | None:
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        value = parse_json(line, with_all_numbers=True)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _end_of_last_line(fd: int, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        block = os.pread(fd, end - start, start)
        newline = block.rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0

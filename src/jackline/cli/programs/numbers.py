"""The metrics of a run: every value since the last look, so that none between two looks is missed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jackline.checkpoint.mirror.bundle import TAIL_BYTES
from jackline.rundir.access.reading import offset_after, read_part
from jackline.rundir.jsonl import read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.registry import is_copy

_NOT_METRICS = ("step", "at_s", "epoch", "attempt")
_FIRST_LOOK_BYTES = 64 << 10
_KNOWN_BYTES = 1000


class MetricsTail:
    """Reads on in every metrics file of the run. The first look takes only what the ends of the files hold."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._offsets: dict[Path, int] = {}
        self._last: dict[Path, bytes] = {}  # of a copy: what stands before the offset
        self._is_copy = is_copy(run)
        self.latest: dict[str, float] = {}
        self._add(self._first_look())

    def read(self) -> dict[str, list[float]]:
        """Values written since the last call, oldest first."""
        found: dict[str, list[float]] = {}
        for path in self._files():
            lines = read_lines(path, self._begin(path))
            self._note(path, lines.next_offset)
            for name, value in self._add(lines.records):
                found.setdefault(name, []).append(value)
        return found

    def _first_look(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for path in self._files():
            # It may begin inside a line, which then counts as damaged and is passed over.
            lines = read_lines(path, max(0, _size(path) - _FIRST_LOOK_BYTES))
            self._note(path, lines.next_offset)
            records += lines.records
        return records

    def _begin(self, path: Path) -> int:
        """Where to read on. The copy of a long file in a mirror is its end alone, and its beginning moves on."""
        offset, last = self._offsets.get(path, 0), self._last.get(path, b"")
        found = offset_after(path, offset, last, TAIL_BYTES) if self._is_copy else offset
        return max(0, _size(path) - _FIRST_LOOK_BYTES) if found is None else found

    def _note(self, path: Path, offset: int) -> None:
        self._offsets[path] = offset
        if self._is_copy:
            size = min(_KNOWN_BYTES, offset)
            self._last[path] = read_part(path, offset - size, size)

    def _files(self) -> list[Path]:
        return sorted(self._run.path.glob("metrics-*.jsonl"))

    def _add(self, records: Iterable[dict[str, Any]]) -> list[tuple[str, float]]:
        found = [(name, value) for record in records for name, value in _values(record)]
        self.latest.update(found)
        return found


def _values(record: dict[str, Any]) -> list[tuple[str, float]]:
    """Its numbers; JSON has no nan and inf, so they are written as text. One beyond all sense is left out."""
    found = []
    for name, value in record.items():
        if name not in _NOT_METRICS and (type(value) in (int, float) or value in ("nan", "inf", "-inf")):
            with contextlib.suppress(OverflowError):
                found.append((name, float(value)))
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0

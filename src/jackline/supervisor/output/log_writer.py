"""out.log: every line of the child with its time, and our own notes among them.

Owns: the timestamp, writing only whole lines, and reporting lines that are missing because the disk was full. Never
raises: a log that cannot be written must not end the run. Does not own: where the lines come from (reader.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from jackline.rundir.access.writing import open_own

NOTE_MARK = "[jackline] "
_MAX_LATE_NOTES = 100


class LogWriter:
    """The only writer of out.log. With `size_bytes` the file is truncated to what a previous writer had recorded."""

    def __init__(self, path: Path, *, size_bytes: int | None = None) -> None:
        self._path = path
        self._fd = -1
        self._size_bytes = 0
        self._num_lost = 0
        self._lost_since_s = 0.0
        self._late_notes: list[tuple[str, float]] = []
        self._paused = ""
        self.problem = ""
        self._open(size_bytes)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def num_lost_lines(self) -> int:
        """Lines not written because the disk was full; 0 again once the gap is noted in the log."""
        return self._num_lost

    def pause(self, why: str) -> None:
        """Write nothing more: the space that is left is needed elsewhere."""
        self._paused = why

    def resume(self) -> None:
        self._paused = ""

    def write(self, texts: Iterable[str], now_s: float) -> bool:
        """Append one line per text. False when some are missing; the log states how many once there is space."""
        lines = texts if isinstance(texts, Sequence) else list(texts)
        if not lines:
            return True
        if not self._is_ready(now_s):
            self._lose(len(lines), now_s)
            return False
        mark = stamp(now_s) + " "
        body = mark + ("\n" + mark).join(lines) + "\n"
        return self._append(body.encode("utf-8", "backslashreplace"), now_s)

    def note(self, text: str, now_s: float) -> bool:
        """Write a line of our own. If that fails now, the line is written later."""
        line = f"{stamp(now_s)} {NOTE_MARK}{text}"
        if self._is_ready(now_s):
            num_lost = self._num_lost
            if self._append(line.encode("utf-8", "backslashreplace") + b"\n", now_s):
                return True
            self._num_lost = num_lost  # the line is late, not lost
        if len(self._late_notes) < _MAX_LATE_NOTES:
            self._late_notes.append((line, now_s))
        return False

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = -1

    def _open(self, size_bytes: int | None) -> None:
        try:
            self._fd = open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            size = os.fstat(self._fd).st_size
            if size_bytes is not None and size_bytes < size:
                os.ftruncate(self._fd, size_bytes)
                size = size_bytes
            self._size_bytes = size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                self._append(b"\n", 0.0)  # the next line must not be appended to an incomplete last line
            self.problem = ""
        except OSError as error:
            self.close()
            self.problem = f"out.log cannot be opened: {error.strerror}"

    def _is_ready(self, now_s: float) -> bool:
        """Whether the file is open, not paused, and the gap since the last failure is noted."""
        if self._paused:
            self.problem = f"out.log is not written: {self._paused}"
            return False
        if self._fd < 0:
            self._open(None)
            if self._fd < 0:
                return False
        self.problem = ""
        return self._tell_gap(now_s) and self._write_late_notes()

    def _tell_gap(self, now_s: float) -> bool:
        if not self._num_lost:
            return True
        lines = "1 line of output is" if self._num_lost == 1 else f"{self._num_lost} lines of output are"
        text = f"{lines} missing here: the disk was full since {stamp(self._lost_since_s)}"
        num_lost, self._num_lost = self._num_lost, 0
        if self._append(f"{stamp(now_s)} {NOTE_MARK}{text}\n".encode(), now_s):
            return True
        self._num_lost = num_lost
        return False

    def _write_late_notes(self) -> bool:
        while self._late_notes:
            line, at_s = self._late_notes[0]
            num_lost = self._num_lost
            if not self._append(line.encode("utf-8", "backslashreplace") + b"\n", at_s):
                self._num_lost = num_lost
                return False
            self._late_notes.pop(0)
        return True

    def _append(self, data: bytes, now_s: float) -> bool:
        """Write all of it, or as many whole lines as the disk takes; the rest counts as lost."""
        at = 0
        try:
            while at < len(data):
                at += os.write(self._fd, data[at:] if at else data)
        except OSError as error:
            kept = data.rfind(b"\n", 0, at) + 1
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size_bytes + kept)
            self._size_bytes += kept
            self._lose(data.count(b"\n", kept), now_s)
            self.problem = f"out.log cannot be written: {error.strerror}"
            return False
        self._size_bytes += len(data)
        return True

    def _lose(self, num_lines: int, now_s: float) -> None:
        if not self._num_lost:
            self._lost_since_s = now_s
        self._num_lost += num_lines


def stamp(now_s: float) -> str:
    """1794708819.17 -> '2026-11-15T02:13:39.1Z'. Tenths are rounded down, so that a stamp is never in the future."""
    tenths = int(now_s * 10)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(tenths // 10)) + f".{tenths % 10}Z"

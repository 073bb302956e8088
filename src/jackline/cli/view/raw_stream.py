"""The child's raw file as a viewer reads it: its bytes without our protocol lines and without a launcher's report.

Owns: this viewer's read position, the count of bytes it missed because the supervisor freed them, and what counts as
a protocol line. What a launcher's report is stands in `diagnosis.deaths.launcher`. Does not own: showing anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from jackline.diagnosis.deaths.launcher import HEADER, LauncherNoise
from jackline.rundir.access.reading import open_plain
from jackline.supervisor.output.progress import PROTOCOL, parse_protocol
from jackline.supervisor.output.room import CutWatch, first_data

BLOCK_BYTES = 1 << 20
TAIL_BYTES = 64 << 10
SETTLE_AFTER_S, REPORT_PATIENCE_S = 0.3, 5.0
_MARK = PROTOCOL.encode()
_LINE = re.compile(rb"\r?" + re.escape(_MARK) + rb"[^\n]{0,4096}\n")
_MAX_HELD = 4096
_FOLDED = (HEADER.encode(), b"torch/distributed/elastic/")


class RawStream:
    """One raw file, as read by one viewer."""

    def __init__(self, path: Path, *, is_err: bool = False, from_start: bool = True) -> None:
        self._path = path
        self.is_err = is_err
        self._fd = -1
        self._offset = 0
        self._from_start = from_start
        self._filter = ProtocolFilter()
        self._fold = FoldFilter()
        self._cut = CutWatch()
        self.skipped_bytes = 0
        self._has_news = False
        self._quiet_since_s = 0.0

    def read(self) -> bytes:
        """New bytes; empty when there are none. `skipped_bytes` counts bytes that were freed before we read them."""
        if self._fd < 0 and not self._open():
            return b""
        self._pass_over_hole()
        data = os.pread(self._fd, BLOCK_BYTES, self._offset)
        if self._cut.is_cut(self._fd, self._offset):
            self._offset, self._cut = 0, CutWatch()
            return self.read()
        if not data:
            return b""
        if self._pass_over_hole():
            return self.read()  # freed while we read it: what we got may be zeros
        self._offset += len(data)
        self._cut.note(data)
        self._has_news = True
        return self._fold.feed(self._filter.feed(data)) or self.read()

    def settle(self) -> bytes:
        """Return the bytes held back as a possible start of a protocol line or of a launcher's report: at the end."""
        return self._fold.feed(self._filter.flush()) + self._fold.flush()

    def settle_if_quiet(self, now_s: float) -> bytes:
        """The same after a while without new bytes. A launcher on a busy machine takes its time for a report."""
        if self._has_news:
            self._has_news, self._quiet_since_s = False, now_s
        patience_s = REPORT_PATIENCE_S if self._fold.is_holding else SETTLE_AFTER_S
        return self.settle() if now_s - self._quiet_since_s > patience_s else b""

    def take_folded(self) -> int:
        """Lines of a launcher's report that were left out since the last call; 0 while such a report is read."""
        return self._fold.take_folded()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        try:
            self._fd = open_plain(self._path)
        except OSError:
            return False
        if not self._from_start:
            self._offset = _last_lines(self._fd)
        return True

    def _pass_over_hole(self) -> bool:
        size = os.fstat(self._fd).st_size
        if self._offset >= size:
            return False
        data = first_data(self._fd, self._offset)
        start = size if data is None else data
        if start <= self._offset:
            return False
        self.skipped_bytes += start - self._offset
        self._offset = start
        return True


class ProtocolFilter:
    """Removes complete, well-formed protocol lines from a stream; everything else passes unchanged."""

    def __init__(self) -> None:
        self._held = b""
        self._is_at_start = True

    def feed(self, data: bytes) -> bytes:
        block = self._held + data
        end = len(block) - _num_to_hold(block, is_at_start=self._is_at_start)
        self._held = block[end:]
        return self._without_protocol(block[:end])

    def flush(self) -> bytes:
        block, self._held = self._held, b""
        return self._without_protocol(block)

    def _without_protocol(self, block: bytes) -> bytes:
        if not block:
            return b""
        kept = block
        if _MARK in block:
            kept = _LINE.sub(lambda match: b"" if self._is_protocol(match, block) else match[0], block)
        self._is_at_start = block[-1:] in b"\r\n"
        return kept

    def _is_protocol(self, match: re.Match[bytes], block: bytes) -> bool:
        line = match[0]
        before = block[match.start() - 1 : match.start()] if match.start() else b""
        stands_alone = line[:1] == b"\r" or before in (b"\n", b"\r") or (not before and self._is_at_start)
        text = line.strip(b"\r\n").decode("utf-8", "backslashreplace")
        return stands_alone and parse_protocol(text) is not None


class FoldFilter:
    """Leaves out what a launcher says about failed ranks. Everything else passes at once, also unfinished lines."""

    def __init__(self) -> None:
        self._noise = LauncherNoise()
        self._row = b""  # a line whose end is not there yet and which may belong to a report
        self._is_at_start = True

    def feed(self, data: bytes) -> bytes:
        block, self._row = self._row + data, b""
        if not block:
            return b""
        end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        is_new_row = self._is_at_start or end > 0
        if is_new_row and end < len(block) and self._noise.is_of_interest(block[end:].decode("latin-1")):
            block, self._row = block[:end], block[end:]
        if block and (self._noise.is_holding or any(mark in block for mark in _FOLDED)):
            first = b"" if self._is_at_start else block[: block.find(b"\n") + 1]
            self._is_at_start = block.endswith((b"\n", b"\r"))
            return first + b"".join(self._lines(block[len(first) :]))
        self._is_at_start = block.endswith((b"\n", b"\r")) if block else self._is_at_start
        return block

    def _lines(self, block: bytes) -> Iterator[bytes]:
        for line in block.splitlines(keepends=True):
            yield from (one.encode("latin-1") for one in self._noise.feed(line.decode("latin-1")))

    @property
    def is_holding(self) -> bool:
        return self._noise.is_holding

    def flush(self) -> bytes:
        row, self._row = self._row, b""
        self._is_at_start = self._is_at_start and not row
        return b"".join(one.encode("latin-1") for one in self._noise.release()) + row

    def take_folded(self) -> int:
        if self._noise.is_holding:
            return 0
        count, self._noise.num_folded = self._noise.num_folded, 0
        return count


def _num_to_hold(block: bytes, *, is_at_start: bool) -> int:
    """How many bytes at the end may be the beginning of a protocol line."""
    row = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
    if row == 0 and not is_at_start:
        return 0
    tail = block[row:]
    is_candidate = tail.startswith(_MARK) or _MARK.startswith(tail)
    if not is_candidate or len(tail) > _MAX_HELD:
        return 0
    has_cr = block[row - 1 : row] == b"\r"
    return len(tail) + has_cr


def _last_lines(fd: int) -> int:
    """The offset of the start of a line near the end of the file."""
    size = os.fstat(fd).st_size
    start = max(0, size - TAIL_BYTES)
    newline = os.pread(fd, TAIL_BYTES, start).find(b"\n") if start else -1
    return start + newline + 1

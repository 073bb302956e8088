"""Splits a byte stream into lines and progress-bar refreshes, wherever the reads cut it.

Owns: line ends (LF, CRLF, CR), which terminal sequences may enter a log, and a buffer that stays small for any
input. Does not own: what the text means (progress.py) or where it goes (reader.py).

The log gets a progress bar's first state, then one line per 30 s or per 10 %, and its last state.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, NamedTuple

from jackline.supervisor.output.progress import Progress

MAX_PIECE_BYTES = 64 << 10
_MAX_ROWS_UP = 100
_ESC = b"\x1b"

Kind = Literal["line", "bar"]

_ANSI = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor moves, erasing
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|[PX^_][^\x1b]*\x1b\\"  # DCS and similar strings
    r"|[ -/]*[0-~])"
)
_ROW_MOVE = re.compile(rb"\x1b\[(\d*)([ABEFHJ])")
# Tab and LF stay. C1 controls too: 0x9b opens an escape sequence on some terminals.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CONTROL_BYTES = bytes(code for code in (*range(32), 127) if code not in b"\t\n")


class Piece(NamedTuple):
    """One line, or one refresh of a bar. A tuple, because a frozen dataclass costs a second per million lines."""

    text: str
    kind: Kind
    is_continued: bool = False  # the line was too long: it continues in the next piece


class LineSplitter:
    """Takes bytes in portions of any size; the pieces do not depend on how the bytes were cut."""

    def __init__(self) -> None:
        self._held = b""
        # A sequence of CRs at the very end is held as one, so that it cannot grow the buffer.
        self._num_dropped_crs = 0
        # How many rows the cursor is above the lowest row: there a LF redraws and does not add a line.
        self._rows_up = 0

    @property
    def partial(self) -> bytes:
        """The unfinished last line, unchanged."""
        return self._held.rstrip(b"\r")

    @property
    def partial_text(self) -> str:
        return clean(self.partial)

    @property
    def num_pending_bytes(self) -> int:
        """Number of bytes that were fed and are in no piece yet."""
        return len(self._held) + self._num_dropped_crs

    def feed(self, data: bytes) -> list[Piece]:
        if not data:
            return []
        block = self._held + data if self._held else data
        if self._rows_up == 0 and b"\r" not in block and _ESC not in block and _has_short_lines(block):
            end = block.rfind(b"\n") + 1
            self._held, self._num_dropped_crs = block[end:], 0
            return _plain_lines(block[:end]) if end else []
        return self._scan(block)

    def flush(self) -> list[Piece]:
        """At the end of the stream: return the held bytes as a last line without a newline."""
        held, self._held, self._num_dropped_crs = self._held, b"", 0
        if not held:
            return []
        text = held.rstrip(b"\r")
        return [self._finish(text, "bar" if len(text) < len(held) else "line")] if text else []

    def _scan(self, block: bytes) -> list[Piece]:
        pieces: list[Piece] = []
        start = 0
        for end, next_start, is_line in _ends(block):
            if not is_line and next_start == len(block):
                break  # a LF may follow: CRLF is one line end
            start = self._cut_long(block, start, end, pieces)
            piece = self._finish(block[start:end], "line" if is_line else "bar")
            if piece.text or piece.kind == "line":
                pieces.append(piece)
            start = next_start
        self._hold(block, start, pieces)
        return pieces

    def _hold(self, block: bytes, start: int, pieces: list[Piece]) -> None:
        content_end = len(block.rstrip(b"\r")) if block.endswith(b"\r") else len(block)
        content_end = max(content_end, start)
        num_crs = len(block) - content_end
        # No line ended in this block, so the CRs dropped before belong to the same sequence.
        num_carried = self._num_dropped_crs if start == 0 else 0
        start = self._cut_long(block, start, content_end, pieces)
        self._held = block[start:content_end] + b"\r"[:num_crs]
        self._num_dropped_crs = num_crs - 1 + num_carried if num_crs else 0

    def _cut_long(self, block: bytes, start: int, end: int, pieces: list[Piece]) -> int:
        """Emit full pieces of an overlong line; returns where its rest begins."""
        while end - start > MAX_PIECE_BYTES:
            cut = _cut_point(block, start)
            pieces.append(Piece(clean(block[start:cut]), "line", is_continued=True))
            start = cut
        return start

    def _finish(self, raw: bytes, kind: Kind) -> Piece:
        if _ESC in raw:
            self._follow_cursor(raw)
        if kind == "line" and self._rows_up:
            self._rows_up -= 1
            kind = "bar"
        return Piece(clean(raw), kind)

    def _follow_cursor(self, raw: bytes) -> None:
        """rich and nested tqdm move up, rewrite rows and move down again by LF: those are refreshes, not lines."""
        rows = self._rows_up
        for number, move in _ROW_MOVE.findall(raw):
            count = int(number[:4] or b"1")
            if move in b"AF":
                rows = min(rows + count, _MAX_ROWS_UP)
            elif move in b"BE":
                rows = max(rows - count, 0)
            else:
                rows = 0
        self._rows_up = rows


def clean(raw: bytes) -> str:
    """Text fit for a log: no escape sequences, no control characters; what is not UTF-8 is shown as \\xNN."""
    text = raw.decode("utf-8", "backslashreplace")
    if _ESC in raw:
        text = _ANSI.sub("", text)
    return _CONTROL.sub(_escape, text) if _may_have_controls(raw) else text


def _plain_lines(block: bytes) -> list[Piece]:
    """Whole lines, none overlong, no CR and no ESC. Costs about 0.4 us a line, so no work per line in Python."""
    text = block.decode("utf-8", "backslashreplace")
    if _may_have_controls(block):
        text = _CONTROL.sub(_escape, text)
    texts = text.split("\n")
    texts.pop()
    return list(map(Piece._make, zip(texts, repeat("line"), repeat(False), strict=False)))


def _ends(block: bytes) -> Iterator[tuple[int, int, bool]]:
    """Where each line or refresh ends, where the next begins, and whether it was a LF.

    Uses find, because a regex takes 50 ns a byte: five seconds for a line of 100 MB.
    """
    at, line_feed, carriage_return = 0, -2, -2
    while True:
        if line_feed < at and line_feed != -1:
            line_feed = block.find(b"\n", at)
        if carriage_return < at and carriage_return != -1:
            carriage_return = block.find(b"\r", at)
        if line_feed < 0 and carriage_return < 0:
            return
        is_line = carriage_return < 0 or 0 <= line_feed < carriage_return
        end = at = line_feed if is_line else carriage_return
        if not is_line:
            while block[at + 1 : at + 2] == b"\r":
                at += 1
            is_line = line_feed == at + 1
            at += is_line
        at += 1
        yield end, at, is_line


def _may_have_controls(raw: bytes) -> bool:
    """Checks the bytes, since that is twenty times faster than a regex over text.

    C1 controls are c2 80 to c2 9f. Harmless characters (the degree sign) begin with c2 too; they only cost time.
    """
    return b"\xc2" in raw or len(raw.translate(None, _CONTROL_BYTES)) != len(raw)


def _has_short_lines(block: bytes) -> bool:
    """True when certainly no line is overlong: each half window holds a line end."""
    if len(block) <= MAX_PIECE_BYTES:
        return True
    half = MAX_PIECE_BYTES // 2
    return all(block.find(b"\n", at, at + half) >= 0 for at in range(0, len(block) - half + 1, half))


def _cut_point(block: bytes, start: int) -> int:
    """A position not within a character or an escape sequence; depends only on the bytes of the line."""
    cut = start + MAX_PIECE_BYTES
    for back in range(4):
        if block[cut - back] & 0xC0 != 0x80:
            cut -= back
            break
    escape = block.rfind(_ESC, cut - 64, cut)
    return escape if escape > start else cut


def _escape(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"


EVERY_S = 30.0
STEP_AT_MOST_EVERY_S = 0.9  # short bars that restart again and again would fill the log
_MAX_BARS = 64
_VARYING = re.compile(r"[\d.,:%]+|[━╸╺█▏▎▍▌▋▊▉░▒▓#=>*⠀-⣿|/\\-]+")


@dataclass
class _Bar:
    logged: str
    logged_s: float
    logged_tenth: int
    seen_s: float
    pending: str | None = None


class BarFold:
    """The progress bars of one stream that are being redrawn now, reduced to a few log lines."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self._bars: OrderedDict[str, _Bar] = OrderedDict()
        self._every_s = every_s

    def refresh(self, text: str, progress: Progress | None, now_s: float) -> list[str]:
        """Lines to log because of this refresh."""
        if not text.strip():
            return []
        key = bar_key(text, progress)
        tenth = _tenth(progress)
        bar = self._bars.get(key)
        if bar is None:
            self._bars[key] = _Bar(text, now_s, tenth, now_s)
            return [*self._evict(), text]
        self._bars.move_to_end(key)
        bar.seen_s = now_s
        silent_s = now_s - bar.logged_s
        if silent_s < (self._every_s if tenth == bar.logged_tenth else STEP_AT_MOST_EVERY_S):
            bar.pending = text
            return []
        # A bar that restarts (for the next epoch) has a last state too.
        restarted = [bar.pending] if tenth < bar.logged_tenth and bar.pending else []
        bar.logged, bar.logged_s, bar.logged_tenth, bar.pending = text, now_s, tenth, None
        return [*restarted, text]

    def end(self, text: str, progress: Progress | None) -> bool:
        """A line end closes this bar. True when the log already has this state (tqdm prints its last state twice)."""
        bar = self._bars.pop(bar_key(text, progress), None)
        return bar is not None and bar.pending is None and bar.logged.rstrip() == text.rstrip()

    def overdue(self, now_s: float) -> list[str]:
        """Last states of bars that are not redrawn any more; those bars are forgotten."""
        ended = [key for key, bar in self._bars.items() if now_s - bar.seen_s >= self._every_s]
        bars = [self._bars.pop(key) for key in ended]
        return [bar.pending for bar in bars if bar.pending is not None]

    def flush(self) -> list[str]:
        texts = [bar.pending for bar in self._bars.values() if bar.pending is not None]
        self._bars.clear()
        return texts

    def _evict(self) -> list[str]:
        if len(self._bars) <= _MAX_BARS:
            return []
        _, oldest = self._bars.popitem(last=False)
        return [oldest.pending] if oldest.pending is not None else []


def bar_key(text: str, progress: Progress | None) -> str:
    """What stays the same while a bar moves."""
    if progress is not None:
        return f"{progress.phase}|{progress.unit}|{progress.total}"
    return " ".join(_VARYING.sub(" ", text[:200]).split())[:60]


def _tenth(progress: Progress | None) -> int:
    if progress is None or not progress.total:
        return 0
    return int(10 * min(1.0, progress.done / progress.total))

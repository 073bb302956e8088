"""Where the child has left the cursor, so that our own line can come and go without a trace.

Pure: bytes in, a picture of the lowest rows out. A picture good enough for bars, not a terminal emulator.
"""

from __future__ import annotations

import re
import unicodedata

MAX_ROW_BYTES = 4096
_MAX_ROWS_UP = 100
_CSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f]")
_MOVE = re.compile(rb"\x1b\[(\d{0,3})([ABEF])|\n")


class ChildRow:
    """The row the child is writing now, and how many of its rows are below."""

    def __init__(self) -> None:
        self.text = b""
        self.ends_with_cr = False
        self.rows_below = 0
        self.is_one_of_several = False  # the cursor came down onto a row that was written before

    @property
    def is_open(self) -> bool:
        """Something stands on the row, or rows below belong to the child: a bar in progress, a prompt."""
        return bool(self.text) or self.rows_below > 0 or self.is_one_of_several

    def feed(self, data: bytes) -> None:
        if not data:
            return
        newline = data.rfind(b"\n")
        if self.rows_below or b"\x1b[" in data:
            self._follow(data)
        elif newline >= 0:
            self.is_one_of_several = False
        if newline >= 0:
            self.text, self.ends_with_cr = b"", False
            data = data[newline + 1 :]
        for number, part in enumerate(data[-MAX_ROW_BYTES:].split(b"\r")):
            if part:
                overwrites = number > 0 or self.ends_with_cr
                self.text = (part if overwrites else self.text + part)[-MAX_ROW_BYTES:]
                self.ends_with_cr = False
            if number > 0 and not part:
                self.ends_with_cr = True
        if not self.text:
            self.ends_with_cr = False

    @property
    def column(self) -> int:
        """How many cells the cursor stands from the left, if the row were endless."""
        return 0 if self.ends_with_cr else num_cells(_CSI.sub(b"", self.text).decode("utf-8", "replace"))

    def redraw(self) -> bytes:
        """The bytes that put the row back and the cursor where it was."""
        return self.text + (b"\r" if self.ends_with_cr else b"")

    def _follow(self, data: bytes) -> None:
        for move in _MOVE.finditer(data):
            count = int(move[1] or 1) if move[2] else 1
            if move[2] in (b"A", b"F"):
                self.rows_below = min(self.rows_below + count, _MAX_ROWS_UP)
                continue
            self.is_one_of_several = self.rows_below >= count
            self.rows_below = max(self.rows_below - count, 0)


def num_cells(text: str) -> int:
    """East Asian signs take two cells, marks above and below a letter none."""
    if text.isascii():
        return len(text)
    return sum(_cells_of(sign) for sign in text)


def cut_to_cells(text: str, limit: int) -> str:
    """As much of `text` as fits; a status line that wraps cannot be erased again."""
    if len(text) * 2 <= limit or (text.isascii() and len(text) <= limit):
        return text
    used = 0
    for index, sign in enumerate(text):
        used += _cells_of(sign)
        if used > limit:
            return text[:index]
    return text


def _cells_of(sign: str) -> int:
    if unicodedata.combining(sign):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1

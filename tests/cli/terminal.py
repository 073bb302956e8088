"""A terminal just good enough to see what a person would see: CR, LF, cursor up and down, erasing, wrapping."""

from __future__ import annotations

import re

_PARTS = re.compile(r"\x1b\[(\d*)([A-Za-z])|\r|\n|[^\x1b]")


class Terminal:
    """As many rows as needed, `columns` wide. `rows` is what stands on them."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self._cells: list[list[str]] = [[]]
        self._row = self._column = 0

    def feed(self, text: str) -> Terminal:
        for part in _PARTS.finditer(text):
            if part[2]:
                self._control(part[2], int(part[1] or 0))
            elif part[0] == "\r":
                self._column = 0
            elif part[0] == "\n":
                self._down(1)
            else:
                self._put(part[0])
        return self

    @property
    def rows(self) -> list[str]:
        rows = ["".join(cells).rstrip() for cells in self._cells]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def cursor(self) -> tuple[int, int]:
        return self._row, self._column

    def _control(self, letter: str, number: int) -> None:
        if letter == "A":
            self._row = max(0, self._row - (number or 1))
        elif letter == "B":
            self._down(number or 1)
        elif letter == "C":
            self._column = min(self.columns - 1, self._column + (number or 1))
        elif letter == "K":
            self._cells[self._row] = [] if number == 2 else self._cells[self._row][: self._column]

    def _down(self, count: int) -> None:
        self._row += count
        while len(self._cells) <= self._row:
            self._cells.append([])

    def _put(self, sign: str) -> None:
        if self._column >= self.columns:
            self._column = 0
            self._down(1)
        cells = self._cells[self._row]
        cells.extend(" " * (self._column + 1 - len(cells)))
        cells[self._column] = sign
        self._column += 1

"""Curves made of characters: braille dots where the terminal has them, letters where it has not. Pure.

Owns turning points into rows of text with an axis. Does not own: which curves are drawn (curves.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jackline.cli.text.paint import num_cells
from jackline.immutable import immutable

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille cell, by row and column
_BRAILLE = 0x2800
MARKS = "*o+x#@%&"
# Colours that are told apart on dark and on light terminals; red is left for what is dead.
COLORS = ("36", "33", "35", "32", "34", "96", "93", "95")
LABEL = 9  # cells before the axis


@immutable
class Curve:
    """Points in order of x. A value that is not finite leaves a gap."""

    name: str
    points: tuple[tuple[float, float], ...]


@immutable
class Style:
    """How it is drawn. `columns` is the width of everything, labels included."""

    columns: int
    rows: int
    use_braille: bool = True
    use_color: bool = False
    is_log: bool = False


@immutable
class Frame:
    """What the edges of the drawing stand for."""

    left: float
    right: float
    bottom: float
    top: float


def draw(curves: Sequence[Curve], frame: Frame, style: Style) -> list[str]:
    """Rows of text: labels of y, an axis, the curves. The first row is the top."""
    width = max(10, style.columns - LABEL - 1)
    cells: list[list[tuple[int, int]]] = [[(0, -1)] * width for _ in range(style.rows)]  # dots, and whose they are
    per_x, per_y = (2, 4) if style.use_braille else (1, 1)
    for number, curve in enumerate(curves):
        for x, y in _dots(curve, frame, (width * per_x, style.rows * per_y), is_log=style.is_log):
            row, column = y // per_y, x // per_x
            bits, _ = cells[row][column]
            dot = _DOTS[y % 4][x % 2] if style.use_braille else 1
            cells[row][column] = (bits | dot, number)
    labels = _labels(frame, style)
    return [
        f"{labels[at]:>{LABEL - 1}} ┤" + _row(row, style)
        if style.use_braille
        else f"{labels[at]:>{LABEL - 1}} |" + _row(row, style)
        for at, row in enumerate(cells)
    ]


def frame_of(curves: Sequence[Curve], *, is_log: bool = False) -> Frame | None:
    """Around all finite points; None when there are none."""
    found = [(x, y) for curve in curves for x, y in curve.points if math.isfinite(y) and (y > 0 or not is_log)]
    if not found:
        return None
    xs, ys = [x for x, _ in found], [y for _, y in found]
    bottom, top = min(ys), max(ys)
    if bottom == top:
        room = abs(top) * 0.1 or 1.0
        bottom, top = bottom - (0 if is_log else room), top + room
    return Frame(min(xs), max(xs), bottom, top)


def x_axis(frame: Frame, columns: int, word: str) -> str:
    """'0                     step                  10,000', below the drawing."""
    width = max(10, columns - LABEL - 1)
    left, right = format_x(frame.left, word), format_x(frame.right, word)
    middle = word.center(max(0, width - num_cells(left) - num_cells(right)))
    return " " * (LABEL + 1) + f"{left}{middle}{right}"[:width]


def format_x(value: float, word: str) -> str:
    if word == "time":
        from jackline.units import format_short

        return format_short(value)
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.2f}"


def format_y(value: float) -> str:
    """At most eight characters."""
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.1f}G"
    if size >= 1e6:
        return f"{value / 1e6:.1f}M"
    if size >= 1e4:
        return f"{value / 1e3:.1f}k"
    if size and size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.{1 if size >= 100 else 2 if size >= 10 else 3}f}"


def _labels(frame: Frame, style: Style) -> list[str]:
    """At the top, in the middle and at the bottom."""
    labels = [""] * style.rows
    places = {0, style.rows - 1, *([(style.rows - 1) // 2] if style.rows >= 7 else [])}
    for row in places:
        share = 1 - row / max(1, style.rows - 1)
        labels[row] = format_y(_between(frame, share, is_log=style.is_log))
    return labels


def _between(frame: Frame, share: float, *, is_log: bool) -> float:
    if is_log and frame.bottom > 0:
        return math.exp(math.log(frame.bottom) + share * (math.log(frame.top) - math.log(frame.bottom)))
    return frame.bottom + share * (frame.top - frame.bottom)


def _dots(curve: Curve, frame: Frame, size: tuple[int, int], *, is_log: bool) -> list[tuple[int, int]]:
    """The dots of a curve: its mean in each column of dots, joined by lines."""
    width, height = size
    sums: dict[int, tuple[float, int]] = {}
    for x, y in curve.points:
        if math.isfinite(y) and (y > 0 or not is_log) and frame.left <= x <= frame.right:
            column = _place(x, frame.left, frame.right, width)
            total, count = sums.get(column, (0.0, 0))
            sums[column] = (total + y, count + 1)
    low, high = (math.log(frame.bottom), math.log(frame.top)) if is_log else (frame.bottom, frame.top)
    means = {column: total / count for column, (total, count) in sums.items()}
    found: list[tuple[int, int]] = []
    before: tuple[int, int] | None = None
    for column in sorted(means):
        value = math.log(means[column]) if is_log else means[column]
        dot = (column, height - 1 - _place(value, low, high, height))
        found += _line(before, dot) if before is not None else [dot]
        before = dot
    return found


def _place(value: float, low: float, high: float, count: int) -> int:
    share = 0.5 if high == low else (value - low) / (high - low)
    return min(count - 1, max(0, int(share * (count - 1) + 0.5)))


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """All dots from `start`, which is already drawn, to `end`."""
    wide, high = end[0] - start[0], end[1] - start[1]
    count = max(abs(wide), abs(high), 1)
    return [(start[0] + round(wide * k / count), start[1] + round(high * k / count)) for k in range(1, count + 1)]


def _row(row: Sequence[tuple[int, int]], style: Style) -> str:
    parts, color = [], -1
    for bits, owner in row:
        sign = " " if not bits else chr(_BRAILLE + bits) if style.use_braille else MARKS[owner % len(MARKS)]
        if style.use_color and bits and owner != color:
            parts.append(f"\x1b[{COLORS[owner % len(COLORS)]}m")
            color = owner
        parts.append(sign)
    text = "".join(parts).rstrip()
    return text + "\x1b[0m" if color >= 0 else text

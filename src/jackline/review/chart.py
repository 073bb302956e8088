"""Line charts as SVG text, and the thinning that keeps every peak. Pure, no library, no script.

A million points become a few for each column of pixels: the lowest, the highest and the last. No spike is lost.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from jackline.immutable import immutable
from jackline.units import format_duration

WIDE, HIGH = 600, 180
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 26
Spot = tuple[float, float]


@immutable
class Line:
    name: str
    spots: tuple[Spot, ...]


@immutable
class Chart:
    """`breaks`: places on the x axis where the run was started again."""

    title: str
    lines: tuple[Line, ...]
    x_name: str = "step"
    y_text: Callable[[float], str] = lambda value: f"{value:.4g}"
    breaks: tuple[float, ...] = ()
    starts_at_zero: bool = False


def thin(spots: Sequence[Spot], columns: int = WIDE) -> list[Spot]:
    """The lowest and the highest spot of each column, in order; spots that are not numbers are left out."""
    known = [spot for spot in spots if math.isfinite(spot[0]) and math.isfinite(spot[1])]
    if len(known) <= 2 * columns:
        return known
    low, high = known[0][0], known[-1][0]
    width = (high - low) / columns or 1.0
    kept: list[Spot] = []
    column: list[Spot] = []
    number = 0
    for spot in known:
        if int((spot[0] - low) / width) > number:
            kept += _ends(column)
            column, number = [], int((spot[0] - low) / width)
        column.append(spot)
    return kept + _ends(column)


def _ends(column: list[Spot]) -> list[Spot]:
    if len(column) < 3:
        return column
    least, most = min(column, key=lambda spot: spot[1]), max(column, key=lambda spot: spot[1])
    return sorted({least, most, column[-1]})


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between two values."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(size * unit for size in (1, 2, 5, 10) if size * unit >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def svg(chart: Chart) -> str:
    """Colours come from the page's style (classes l0 to l9), so that dark and light pages share it."""
    lines = [Line(line.name, tuple(thin(line.spots))) for line in chart.lines]
    spots = [spot for line in lines for spot in line.spots]
    if not spots:
        return ""
    xs, ys = [x for x, _ in spots], [y for _, y in spots]
    low, high = (min(0.0, *ys) if chart.starts_at_zero else min(ys)), max(ys)
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
    frame = _Frame(min(xs), max(xs), low, high)
    name = html.escape(chart.title, quote=True)
    parts = [f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{name}">']
    for value in ticks(low, high):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="y">{html.escape(chart.y_text(value))}</text>')
    parts += (
        f'<text x="{frame.x(value)}" y="{HIGH - 8}" class="x">{html.escape(x_text(chart, value))}</text>'
        for value in ticks(frame.left, frame.right, 6)
    )
    for place in chart.breaks:
        if frame.left < place < frame.right:
            x = frame.x(place)
            parts.append(f'<line class="break" x1="{x}" x2="{x}" y1="{TOP}" y2="{HIGH - BOTTOM}"/>')
    for number, line in enumerate(lines):
        path = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in line.spots)
        if len(line.spots) == 1:
            x, y = line.spots[0]
            parts.append(f'<circle class="l{number % 10}" cx="{frame.x(x)}" cy="{frame.y(y)}" r="3"/>')
        else:
            parts.append(f'<polyline class="l{number % 10}" points="{path}"/>')
    return "".join([*parts, "</svg>"])


@immutable
class _Frame:
    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        width = self.right - self.left or 1.0
        return round(LEFT + (WIDE - LEFT - RIGHT) * (value - self.left) / width, 1)

    def y(self, value: float) -> float:
        return round(TOP + (HIGH - TOP - BOTTOM) * (self.high - value) / (self.high - self.low), 1)


def x_text(chart: Chart, value: float) -> str:
    return format_duration(value) if chart.x_name == "time" else f"{value:,.0f}"

"""Tables that fit their terminal: columns that matter least go first, then long cells are cut. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from jackline.cli.text.paint import Tone, num_cells, paint, shorten
from jackline.immutable import immutable

_GAP = "  "
_SHORTEST = 8


@immutable
class Column:
    """`floor`: longer cells are cut first, shorter ones where that is not enough; 0: none ever. `rank`: on a narrow
    terminal the column with the highest rank is left out first: 2 and more before anything is cut, 1 when cutting is
    not enough, 0 never."""

    title: str
    floor: int = 0
    rank: int = 0
    is_right: bool = False


@immutable
class Cell:
    text: str
    tone: Tone = ""


def draw_table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], *, width: int | None, use_color: bool = False
) -> str:
    """One line a row, at most `width` cells wide (None: as wide as it is). A column without any text is left out."""
    table = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    shown = [at for at in range(len(columns)) if columns[at].title or any(row[at].text for row in table)]
    shown = _fitting(columns, table, shown, width)
    widths = _widths(columns, table, shown, width)
    header = [Cell(column.title, "dim") for column in columns]
    return "\n".join(_line(columns, row, shown, widths, use_color) for row in [header, *table])


def _natural(columns: Sequence[Column], table: Sequence[Sequence[Cell]], at: int) -> int:
    return max(num_cells(columns[at].title), *(num_cells(row[at].text) for row in table), 0)


def _fitting(
    columns: Sequence[Column], table: Sequence[Sequence[Cell]], shown: list[int], width: int | None
) -> list[int]:
    """Leave out columns of rank 2 and more until all fit whole, and those of rank 1 until all fit when cut."""
    while width is not None:
        whole = [_natural(columns, table, at) for at in shown]
        cut = [
            min(natural, _SHORTEST) if columns[at].floor else natural
            for at, natural in zip(shown, whole, strict=True)
        ]
        gaps = len(_GAP) * (len(shown) - 1)
        last = max((columns[at].rank for at in shown), default=0)
        if last == 0 or sum(whole if last > 1 else cut) + gaps <= width:
            break
        shown = [at for at in shown if columns[at].rank != last]
    return shown


def _widths(
    columns: Sequence[Column], table: Sequence[Sequence[Cell]], shown: Sequence[int], width: int | None
) -> dict[int, int]:
    widths = {at: _natural(columns, table, at) for at in shown}
    while width is not None and sum(widths.values()) + len(_GAP) * (len(shown) - 1) > width:
        # Cut the widest first, cell by cell, so that what is short stays whole.
        long = [at for at in shown if columns[at].floor and widths[at] > columns[at].floor]
        may_shrink = long or [at for at in shown if columns[at].floor and widths[at] > _SHORTEST]
        if not may_shrink:
            break
        widths[max(may_shrink, key=lambda at: widths[at])] -= 1
    return widths


def _line(
    columns: Sequence[Column], row: Sequence[Cell], shown: Sequence[int], widths: dict[int, int], use_color: bool
) -> str:
    parts = []
    for at in shown:
        text = shorten(row[at].text, widths[at])
        padding = " " * (widths[at] - num_cells(text))
        painted = paint(text, row[at].tone, use_color=use_color)
        is_last = at == shown[-1]
        parts.append(padding + painted if columns[at].is_right else painted + ("" if is_last else padding))
    return _GAP.join(parts).rstrip()

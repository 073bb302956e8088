"""Tables that programs print row by row: CSV, fastai, skorch, spaCy. A header names what the rows below it hold.

Owns which line is a header, which line is a row of it, and which column counts. Does not own: bars below a header
(told.py asks for their cells), nor lines without a header (learned.py).
"""

from __future__ import annotations

import re

from jackline.immutable import immutable
from jackline.supervisor.output.numbers import MEASURED, is_metric
from jackline.supervisor.output.progress import Progress

_MAX_CELLS = 24
_MAX_HEADERS = 4  # a program may write a table of its training and one of its validation by turns
_CELL = re.compile(r"\s*\|\s*|\s{2,}|\t+")
_SIGNS = (",", ";", "\t")
_NAME = re.compile(r"[A-Za-z#_][\w@/%.()#-]*(?: [\w@/%.()#-]+){0,2}")
_VALUE = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf)", re.IGNORECASE)
_WHOLE = re.compile(r"\d+(?:\.0+)?")
_STEP_NAME = re.compile(
    r"#|(?:global_|num_|total_|trainer/)?(?:global_)?(?:steps?|iters?|iterations?|updates?|timesteps?)"
)
_EPOCH_NAME = re.compile(r"epochs?|ep|e")
_ROUND_NAME = re.compile(r"(?:num_)?(rounds?|batch(?:es)?|episodes?)")
_NO_NUMBER = re.compile(
    r"time|date|timestamp|ts|elapsed|eta|seed|id|rank|pid|index|(?:wall|total|epoch)_?time|secs?|seconds"
)
_HELD_OUT = re.compile(r"val|valid|validation|test|eval|dev")


@immutable
class Row:
    """What a row says: where it is, and its numbers by the names of their columns."""

    progress: Progress | None
    numbers: dict[str, float]


class Tables:
    """The newest headers of one command, by their sign and their number of cells."""

    def __init__(self) -> None:
        self._headers: dict[tuple[str, int], list[str]] = {}
        self._newest: list[str] = []

    def note_header(self, text: str) -> None:
        """A line without a number of its own, which may name the columns of those below it."""
        if not MEASURED.search(text) and not any(sign in text for sign in _SIGNS):
            return
        sign, cells = _cells(text)
        if not _least(sign) <= len(cells) <= _MAX_CELLS or not all(map(_NAME.fullmatch, cells)):
            return
        names = [cell.lower().replace(" ", "_") for cell in cells]
        is_measured = len(set(names)) == len(names) and any(is_metric(name, "0.0") for name in names)
        if not is_measured and not (sign and _counter_column(names) is not None):
            return
        self._headers.pop((sign, len(names)), None)
        self._headers[sign, len(names)] = self._newest = names
        if len(self._headers) > _MAX_HEADERS:
            del self._headers[next(iter(self._headers))]

    def take(self, text: str) -> Row | None:
        """A row below a header with as many cells; None for any other line."""
        if not self._headers:
            return None
        sign, cells = _cells(text)
        names = self._headers.get((sign, len(cells)))
        if names is None:
            return None
        named = {name: float(cell) for name, cell in zip(names, cells, strict=True) if _VALUE.fullmatch(cell)}
        if sign:
            return _separated(names, cells, named)
        if not re.fullmatch(r"\d+", cells[0]):
            return None
        numbers = {name: value for name, value in list(named.items())[1:] if is_metric(name, "0.0")}
        return Row(_place(names, cells, named, names[0]), numbers) if numbers else None

    def read_cells(self, text: str) -> dict[str, float]:
        """The metrics in front of a bar, below a header that names them: ultralytics' '  1/3  2.1G  1.2:  28%|'."""
        cells = text.partition(":")[0].split()
        if not self._newest or len(cells) != len(self._newest):
            return {}
        named = zip(self._newest, cells, strict=True)
        return {name: float(cell) for name, cell in named if is_metric(name, "0.0") and _VALUE.fullmatch(cell)}


def _least(sign: str) -> int:
    return 2 if sign else 3


def _cells(text: str) -> tuple[str, list[str]]:
    """The sign between the cells, '' for spaces and bars, and the cells."""
    for sign in _SIGNS:
        if sign in text:
            return sign, [cell.strip().strip("\"'") for cell in text.rstrip("\r\n").split(sign)]
    cells = [cell for cell in _CELL.split(text.strip(" |")) if cell]
    return "", text.split() if len(cells) == 1 else cells


def _separated(names: list[str], cells: list[str], named: dict[str, float]) -> Row | None:
    """A row of CSV: every column has a name, so every number counts that is no counter and no time."""
    others = [cell for cell in cells if cell and not _VALUE.fullmatch(cell)]
    if not named or len(others) > len(cells) // 2 or any(len(cell) > 40 for cell in others):
        return None
    counter = _counter_column(names)
    held_out = next((cell.lower() for cell in others if _HELD_OUT.fullmatch(cell.lower())), "")
    numbers = {
        f"{held_out}_{name}" if held_out else name: value
        for name, value in named.items()
        if name != counter and _counter_column([name]) is None and not _NO_NUMBER.fullmatch(name)
    }
    progress = _place(names, cells, named, counter) if counter is not None else None
    return Row(progress, numbers) if numbers or progress else None


def _counter_column(names: list[str]) -> str | None:
    """The finest counter that a header names."""
    for pattern in (_STEP_NAME, _ROUND_NAME, _EPOCH_NAME):
        found = next((name for name in names if pattern.fullmatch(name)), None)
        if found is not None:
            return found
    return None


def _place(names: list[str], cells: list[str], named: dict[str, float], counter: str) -> Progress | None:
    fine = next((at for at, name in enumerate(names) if _STEP_NAME.fullmatch(name)), None)
    if fine is not None and _WHOLE.fullmatch(cells[fine]):  # a column of steps says more than one of epochs
        epoch = next((named.get(name) for name in names if _EPOCH_NAME.fullmatch(name)), None)
        return Progress("", float(cells[fine]), None, "steps", None, None, "line", "run", epoch, is_guessed=True)
    if named.get(counter, -1.0) < 0:
        return None
    said = _ROUND_NAME.fullmatch(counter)
    unit = (
        said[1].removesuffix("s").replace("batche", "batch") + ("es" if "batch" in said[1] else "s") if said else ""
    )
    unit = unit or ("epochs" if counter.startswith("e") else "rows")
    return Progress("", named[counter], None, unit, None, None, "line", is_guessed=True)

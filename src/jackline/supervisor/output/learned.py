"""Formats that nobody knows, learned from lines that repeat with other numbers, and tables with a header.

A line is reduced to its words; numbers become places. Where such a line came three times, a place whose whole
number only grows counts the steps, and a place with a name before it is a metric. Everything found so is marked as
guessed. Owns that, and the small memory it needs. Does not own: formats that are known (lines.py, numbers.py).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from jackline.immutable import immutable
from jackline.supervisor.output.lines import counts_by_word
from jackline.supervisor.output.numbers import MEASURED, is_metric
from jackline.supervisor.output.progress import Progress

_MAX_TEXT = 400
_MAX_SHAPES = 48
_MAX_PLACES = 16
REPEATS = 3
_TIMES = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"
    r"|\d\d/\d\d(?= \d\d:)|\d+:\d\d(?::\d\d)?(?:[.,]\d+)?"
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:,\d{3})+|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_DIGITS = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?")
_NAME = re.compile(r"([A-Za-z][\w@/.-]*(?: [A-Za-z][\w@/.-]*)?)\s*[:=|]?\s*[\[(]?$")
_NOT_A_NAME = re.compile(r"at|in|on|of|to|is|from|for|by|and|the|an?|line|port|pid|rank|worker|gpu|took|after|m?s")
# A whole number that grows and counts no steps: an address or an amount, by the word before it or the unit behind it.
_NO_COUNT = re.compile(
    r"(?:^|[^a-z])(?:port|pid|process|worker|rank|gpu|node|thread|line|memory|mem|ram|used?|size|free|total|seed|version"
    r"|allocated|reserved|cached|peak|id)$"
)
_AMOUNT = re.compile(r"\s*(?:[KMGT]i?B|bytes?|B|[mun]?s|sec\w*|min\w*|hours?|°C|W|Hz|[KMG]?bps)\b")
# What ninja, CMake and others put in front of words that differ: '[ 12%] Linking ...', '[3/120] Building ...'.
_STEP_NAME = re.compile(r"#|(?:global_|num_|total_)?(?:steps?|iters?|iterations?|updates?|timesteps?)")
_HEAD = re.compile(r"\s*\[\s*\d+\s*(?:%|/\s*\d+)\s*\](?=\s)")
_HAS_DIGIT = re.compile(r"\d")
_OF_WORDS = frozenset({"/", "of", "out of", "von", "de", "sur", "di", "su", "van", "af", "av", "z", "из"})
_CELL = re.compile(r"\s*\|\s*|\s{2,}|\t+")


@dataclass
class _Shape:
    count: int = 0
    last: list[float] = field(default_factory=list)
    grows: list[bool] = field(default_factory=list)  # whole numbers that only grew
    varies: list[bool] = field(default_factory=list)


@immutable
class Learned:
    """What a learned line says."""

    progress: Progress | None
    numbers: dict[str, float]


class Learner:
    """One command's lines, in order."""

    def __init__(self) -> None:
        self._shapes: OrderedDict[str, _Shape] = OrderedDict()
        self._header: list[str] = []

    def take(self, text: str) -> Learned | None:
        """None while the line says nothing, or not yet."""
        text = text[:_MAX_TEXT]
        if not _HAS_DIGIT.search(text) and not MEASURED.search(text):
            return None
        row = self._table(text)
        if row is not None:
            return row
        bare = _TIMES.sub("@", text)
        places = list(_NUMBER.finditer(bare))
        if not places or len(places) > _MAX_PLACES:
            return None
        shape = self._remember(bare, places)
        if shape.count >= REPEATS:
            return _conclude(bare, places, shape)
        head = _HEAD.match(bare)
        if head is None or head[0] == bare:
            return None
        places = list(_NUMBER.finditer(head[0]))
        shape = self._remember(head[0], places)
        return _conclude(head[0], places, shape) if shape.count >= REPEATS else None

    def read_cells(self, text: str) -> dict[str, float]:
        """The metrics in front of a bar, below a header that names them: ultralytics' '  1/3  2.1G  1.2:  28%|'."""
        cells = text.partition(":")[0].split()
        if not self._header or len(cells) != len(self._header):
            return {}
        named = zip(self._header, cells, strict=True)
        return {name: float(cell) for name, cell in named if is_metric(name, "0.0") and _NUMBER.fullmatch(cell)}

    def _remember(self, bare: str, places: list[re.Match[str]]) -> _Shape:
        words = _shape_of(bare)
        shares = [_is_percent(bare, place) for place in places]  # may have a fraction, and may stay for some lines
        values = [float(place[0].replace(",", "")) for place in places]
        shape = self._shapes.pop(words, None)
        if shape is None or len(shape.last) != len(values):
            whole = [place[0].isdigit() or share for place, share in zip(places, shares, strict=True)]
            shape = _Shape(0, values, whole, [False] * len(values))
        self._shapes[words] = shape
        if shape.count:
            shape.grows = [
                grew and (value >= last if share else place[0].isdigit() and value > last)
                for grew, place, share, value, last in zip(
                    shape.grows, places, shares, values, shape.last, strict=True
                )
            ]
            shape.varies = [
                varied or value != last for varied, value, last in zip(shape.varies, values, shape.last, strict=True)
            ]
        shape.last = values
        shape.count += 1
        if len(self._shapes) > _MAX_SHAPES:
            self._shapes.popitem(last=False)
        return shape

    def _table(self, text: str) -> Learned | None:
        """A row below a header that names metrics, as fastai, skorch and spaCy print."""
        cells = [cell for cell in _CELL.split(text.strip(" |")) if cell]
        if len(cells) == 1:
            cells = text.split()
        if len(cells) < 3 or len(cells) > _MAX_PLACES:
            return None
        if not any(character.isdigit() for character in re.sub(r"[A-Za-z_@]+\d*", "", text)):
            if any(is_metric(cell, "0.0") for cell in cells) and all(re.match(r"[A-Za-z#_]", cell) for cell in cells):
                self._header = [cell.strip().lower().replace(" ", "_") for cell in cells]
            return None
        if len(cells) != len(self._header) or not re.fullmatch(r"\d+", cells[0]):
            return None
        named = {name: float(cell) for name, cell in zip(self._header, cells, strict=True) if _NUMBER.fullmatch(cell)}
        first = self._header[0]
        unit = "epochs" if first.startswith(("epoch", "e")) else "rows"
        numbers = {name: value for name, value in list(named.items())[1:] if is_metric(name, "0.0")}
        progress = Progress("", named.get(first, 0.0), None, unit, None, None, "line", is_guessed=True)
        fine = next((at for at, name in enumerate(self._header) if at and _STEP_NAME.fullmatch(name)), None)
        if fine is not None and re.fullmatch(r"\d+", cells[fine]):  # a column of steps says more than one of epochs
            epoch = progress.done if unit == "epochs" else None
            progress = replace(progress, done=float(cells[fine]), unit="steps", epoch=epoch)
        return Learned(progress, numbers) if numbers else None


def _shape_of(bare: str) -> str:
    """Its words. Spaces do not count: '[   64/60000]' and '[12864/60000]' are one format."""
    return "".join(_DIGITS.sub("#", bare).split())


def _conclude(bare: str, places: list[re.Match[str]], shape: _Shape) -> Learned | None:
    grown = [grows and varies for grows, varies in zip(shape.grows, shape.varies, strict=True)]
    at = next((index for index, grows in enumerate(grown) if grows and _counts(bare, places[index])), None)
    progress = counts_by_word(bare)
    if at is not None and progress is None:
        done = shape.last[at]
        is_percent = _is_percent(bare, places[at])
        if is_percent and done > 100:
            return None
        total = 100.0 if is_percent else _total_after(bare, places, shape, at)
        unit = "%" if is_percent else _unit_of(bare, places, at)
        progress = Progress("", done, total, unit, None, None, "line", is_guessed=True)
    if progress is None or at is None:
        return None
    numbers: dict[str, float] = {}
    start = 0
    for index, place in enumerate(places):
        before, start = bare[start : place.start()], place.end()
        name = _NAME.search(before[-48:])
        if index == at or not shape.varies[index] or shape.grows[index] or name is None:
            continue
        words = name[1].lower().split()
        if "." in place[0] and not _NOT_A_NAME.fullmatch(words[-1]):
            numbers["_".join(words)] = shape.last[index]
    return Learned(replace(progress, is_guessed=True), numbers)


def _is_percent(bare: str, place: re.Match[str]) -> bool:
    return bare[place.end() :].lstrip().startswith("%")


def _counts(bare: str, place: re.Match[str]) -> bool:
    before = bare[: place.start()][-48:].lower().rstrip(" :=#[(")
    return not _NO_COUNT.search(before) and not _AMOUNT.match(bare, place.end())


def _total_after(bare: str, places: list[re.Match[str]], shape: _Shape, at: int) -> float | None:
    """'12/100' or '12 of 100', where the second number never changes."""
    word = _unit_of(bare, places, at)
    for index, place in enumerate(places):
        name = _NAME.search(bare[: place.start()][-48:])
        is_total = name is not None and re.fullmatch(r"(?:max|total|num)_?\w+", name[1].lower().split()[-1])
        if word and is_total and name and name[1].lower().rstrip("s").endswith(word.rstrip("s")):
            return shape.last[index] if not shape.varies[index] and shape.last[index] >= shape.last[at] else None
    if at + 1 >= len(places) or shape.varies[at + 1] or shape.last[at + 1] < shape.last[at]:
        return None
    between = bare[places[at].end() : places[at + 1].start()].strip()
    return shape.last[at + 1] if between.lower() in _OF_WORDS else None


def _unit_of(bare: str, places: list[re.Match[str]], at: int) -> str:
    name = _NAME.search(bare[: places[at].start()][-48:])
    word = name[1].lower().split()[-1] if name else ""
    return word if word and not _NOT_A_NAME.fullmatch(word) and len(word) <= 20 else ""

"""Formats that nobody knows, learned from lines that repeat with other numbers.

A line is reduced to its words; numbers become places. Where such a line came three times, a place whose whole number
grows counts the work, a slower one that advances whenever it starts again counts the epochs around it, and a place
with a name before it is a metric. Everything found so is marked as guessed. Owns that, and the small memory it needs.
Does not own: formats that are known (lines.py, numbers.py), tables with a header (tables.py).
"""

from __future__ import annotations

import re
from collections import OrderedDict

from jackline.immutable import immutable
from jackline.supervisor.output.bars import time_left
from jackline.supervisor.output.journey import is_aside
from jackline.supervisor.output.lines import word_counter
from jackline.supervisor.output.numbers import is_metric
from jackline.supervisor.output.progress import Progress
from jackline.supervisor.output.shapes import (
    EPOCH,
    REPEATS,
    Place,
    Shape,
    Words,
    find_roles,
    share_of,
    total_of,
)
from jackline.supervisor.output.tables import Tables

_MAX_TEXT = 400
_MAX_SHAPES = 48
_MAX_PLACES = 16
_REPEATS_OF_ANYTHING = 6  # of a number without a total, a metric beside it or a word for counting
_RARE = 20  # such a number is in at least each twentieth line
_TIMES = re.compile(
    r"\d{4}[-/]\d\d[-/]\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?"
    r"|\d\d/\d\d(?= \d\d:)|\d+:\d\d(?::\d\d)?(?:[.,]\d+)?"
)
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:_\d{3})+|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])"
)
_WHOLE = re.compile(r"\d[\d,_]*")
_DIGITS = re.compile(r"[-+]?\d+(?:[.,_]\d+)*(?:[eE][-+]?\d+)?")
# '1.2k/50k', '1.5M of 3M': what a person reads as 1,200 of 50,000.
_THOUSANDS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([kKM]?)(\s*/\s*|\s+of\s+)(\d+(?:\.\d+)?)([kKM])(?![\w/])")
_FACTORS = {"": 1, "k": 1000, "K": 1000, "M": 1_000_000}
_NAME = re.compile(r"([A-Za-z][\w@/.-]*(?: [A-Za-z][\w@/.-]*)?)\s*[:=|]?\s*[\[(]?$")
_NOT_A_NAME = re.compile(r"at|in|on|of|to|is|from|for|by|and|the|an?|line|port|pid|rank|worker|gpu|took|after|m?s")
# A whole number that grows and counts no steps: an address or an amount, by the word before it or the unit behind it.
_NO_COUNT = re.compile(
    r"(?:(?:^|[^a-z])(?:port|pid|process|worker|rank|gpu|node|thread|line|memory|mem|ram|used?|size|free|total|seed|version"
    r"|allocated|reserved|cached|peak|id|attempt|retry|try|queue)|\.(?:py|cc|cpp|cu|rs|go))$"
)
_AMOUNT = re.compile(r"\s*(?:[KMGT]i?B|bytes?|B|[mun]?s|sec\w*|min\w*|hours?|°C|W|Hz|[KMG]?bps|[A-Za-z]+/s(?:ec)?)\b")
_COUNTING = re.compile(r"step|iter|epoch|batch|total|sample|token|process|done|seen|finish|complet|pass")
_THINGS = re.compile(r"\s+([a-z]{2,19}s)\b(?!\s*[:=]|\s+[-+]?\d)")  # '20 of 50 docs'
_UNIT = re.compile(r"[^\W\d_](?:[^\W\d]|-){0,19}")
_VERB = re.compile(r"\w+ed|seen|done|read|written|at|")
# Such a line names what went wrong with one thing, and its number says which.
_TROUBLE = re.compile(
    r"\b(?:warn(?:ing)?|error|skip\w*|fail\w*|missing|corrupt\w*|invalid|retry\w*|ignor\w*|dropp\w*|bad|cannot|unable)\b"
    r"|\[[WE]\]|^[WE]\d{4} ",
    re.IGNORECASE,
)
# What ninja, CMake and others put in front of words that differ: '[ 12%] Linking ...', '[3/120] Building ...'.
_HEAD = re.compile(r"\s*\[\s*\d+\s*(?:%|/\s*\d+)\s*\](?=\s)")
_FREE_DIGIT = re.compile(r"(?<![A-Za-z_@\d])\d")  # not that of 'acc1'
_HELD_OUT = re.compile(r"val|valid|validat\w+|test|testing|eval|evaluat\w+")
_PLAIN_WORD = re.compile(r"(?<![\w./-])[A-Za-z]+(?![\w./-])")
_OF_WORDS = frozenset({"/", "of", "out of", "von", "de", "sur", "di", "su", "van", "af", "av", "z", "из"})


@immutable
class Learned:
    """What a learned line says."""

    progress: Progress | None
    numbers: dict[str, float]


class Learner:
    """One command's lines, in order."""

    def __init__(self) -> None:
        self._shapes: OrderedDict[str, Shape] = OrderedDict()
        self._tables = Tables()
        self._num_lines = 0

    def take(self, text: str) -> Learned | None:
        """None while the line says nothing, or not yet."""
        text = text[:_MAX_TEXT]
        self._num_lines += 1
        if not _FREE_DIGIT.search(text):
            self._tables.note_header(text)
            return None
        row = self._tables.take(text)
        if row is not None:
            return Learned(row.progress, row.numbers)
        bare = _TIMES.sub("@", text)
        if "k" in bare or "K" in bare or "M" in bare:
            bare = _THOUSANDS.sub(_in_full, bare)
        places = list(_NUMBER.finditer(bare))
        if not places or len(places) > _MAX_PLACES:
            return None
        shape = self._remember(bare, places)
        if shape.count >= REPEATS:
            return self._conclude(text, places, shape)
        head = _HEAD.match(bare)
        if head is None or head[0] == bare:
            return None
        places = list(_NUMBER.finditer(head[0]))
        shape = self._remember(head[0], places)
        return self._conclude(head[0], places, shape) if shape.count >= REPEATS else None

    def read_cells(self, text: str) -> dict[str, float]:
        """The metrics in front of a bar, below a header that names them."""
        return self._tables.read_cells(text)

    def _remember(self, bare: str, places: list[re.Match[str]]) -> Shape:
        key = _shape_of(bare)
        values = [float(place[0].replace(",", "")) for place in places]
        counts = [_WHOLE.fullmatch(place[0]) is not None or _is_percent(bare, place) for place in places]
        shape = self._shapes.pop(key, None)
        if shape is None or len(shape.places) != len(values):
            first = [Place(value, is_count, value) for value, is_count in zip(values, counts, strict=True)]
            shape = Shape(self._num_lines, first)
        else:
            shape.count += 1
            for place, value, is_count in zip(shape.places, values, counts, strict=True):
                place.take(value, is_count=is_count)
            if any(place.move < 0 and place.is_count for place in shape.places):
                for place in shape.places:
                    place.leads += place.move > 0
        self._shapes[key] = shape
        if len(self._shapes) > _MAX_SHAPES:
            self._shapes.popitem(last=False)
        return shape

    def _conclude(self, text: str, places: list[re.Match[str]], shape: Shape) -> Learned | None:
        if shape.words is None:
            shape.words = _read_words(places[0].string, places)
        words = shape.words
        if shape.may_change():
            shape.roles = find_roles(shape, words)
        roles = shape.roles
        if roles is None:
            return None
        at, outer = roles.at, roles.outer
        total = total_of(shape, words, at)
        numbers = _numbers(places, shape, words, at)
        if total is None and at != words.by_word and not numbers and not self._is_steady(shape, words, at):
            return None
        if (total is None and words.is_trouble) or (outer is None and _is_uneven(shape.places[at])):
            return None
        epoch = epochs = None
        if outer is not None and not shape.places[outer].falls:
            epoch, epochs = shape.places[outer].last, total_of(shape, words, outer)
        aside = _aside_of(words, outer, numbers)
        is_training = bool(numbers) or at == words.by_word
        of = share_of(shape, roles, is_open=total is None, is_aside=bool(aside), is_training=is_training)
        done, unit = shape.places[at].last, _unit(words, at)
        eta_s = time_left(text) or None if of == "run" and epoch is None else None
        progress = Progress(aside, done, total, unit, None, eta_s, "line", of, epoch, epochs, is_guessed=True)
        return Learned(progress, numbers)

    def _is_steady(self, shape: Shape, words: Words, at: int) -> bool:
        """Whether a number that nothing calls a counter behaves like one: often, evenly, and long enough."""
        place = shape.places[at]
        if words.shares[at]:
            return True
        if (shape.count - 1) * _RARE < self._num_lines - shape.began_at:
            return False
        # 0, 20, 40: a loop that prints each 20th.
        is_each = place.shortest == place.longest and place.last % place.longest == 0
        is_named = _COUNTING.search(words.names[at]) is not None
        return is_each or is_named or shape.count >= _REPEATS_OF_ANYTHING


def _aside_of(words: Words, outer: int | None, numbers: dict[str, float]) -> str:
    """The name of the preparation or validation that a line is about. What has epochs or a loss is a training, though
    its first word may be 'loader' or 'tokens'."""
    if not words.aside or _HELD_OUT.fullmatch(words.aside):
        return words.aside
    is_training = outer is not None and EPOCH.fullmatch(words.names[outer]) is not None
    return "" if is_training or any(is_metric(name, "0.0") for name in numbers) else words.aside


def _is_uneven(place: Place) -> bool:
    """Work is counted in steps of about one size; numbers of things come in any."""
    return place.uneven * 3 > place.rises


def _shape_of(bare: str) -> str:
    """Its words. Spaces do not count: '[   64/60000]' and '[12864/60000]' are one format."""
    return "".join(_DIGITS.sub("#", bare).split())


def _in_full(match: re.Match[str]) -> str:
    done, total = (float(match[at]) * _FACTORS[match[at + 1]] for at in (1, 4))
    return f"{done:.0f}{match[3]}{total:.0f}"


def _numbers(places: list[re.Match[str]], shape: Shape, words: Words, at: int) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for index, place in enumerate(shape.places):
        if index == at or not (place.rises or place.falls) or "." not in places[index][0]:
            continue
        if (words.shares[index] and not place.falls and index) or not words.names[index]:
            continue
        if not _NOT_A_NAME.fullmatch(words.names[index].split()[-1]):
            name = "_".join(words.names[index].split())
            is_held_out = _HELD_OUT.fullmatch(words.aside) is not None and words.aside not in name
            numbers[f"{words.aside}_{name}" if is_held_out else name] = place.last
    return numbers


def _unit(words: Words, at: int) -> str:
    if words.shares[at]:
        return "%"
    if at == words.by_word:
        return words.word
    word = words.names[at].split()[-1] if words.names[at] else ""
    total = words.totals[at]
    if total is not None and words.things[total] and (_VERB.fullmatch(word) or is_aside(word)):
        return words.things[total]
    if EPOCH.fullmatch(word):
        return "epochs"
    return word if _UNIT.fullmatch(word) and not _NOT_A_NAME.fullmatch(word) else ""


def _read_words(bare: str, places: list[re.Match[str]]) -> Words:
    found = [_NAME.search(bare[max(0, place.start() - 48, end) : place.start()]) for place, end in _with_ends(places)]
    names = tuple(name[1].lower() if name else "" for name in found)
    counted = word_counter(bare)
    by_word = next((at for at, place in enumerate(places) if counted and place.start() == counted[0]), None)
    may_count = tuple(_may_count(bare, place, name) for place, name in zip(places, names, strict=True))
    first = next((at for at, may in enumerate(may_count) if may), 0)
    before = bare[: places[first].start()]
    return Words(
        names,
        tuple(_is_percent(bare, place) for place in places),
        may_count,
        tuple(_total_place(bare, places, names, at) for at in range(len(places))),
        by_word,
        counted[1] if counted else "",
        tuple(thing[1] if (thing := _THINGS.match(bare, place.end())) else "" for place in places),
        next((word for word in _PLAIN_WORD.findall(before) if is_aside(word)), "").lower(),
        _TROUBLE.search(bare) is not None,
    )


def _with_ends(places: list[re.Match[str]]) -> list[tuple[re.Match[str], int]]:
    """Each number with the end of the one before it."""
    return list(zip(places, [0, *(place.end() for place in places)], strict=False))


def _is_percent(bare: str, place: re.Match[str]) -> bool:
    return bare[place.end() : place.end() + 3].lstrip().startswith("%")


def _may_count(bare: str, place: re.Match[str], name: str) -> bool:
    before = bare[: place.start()][-48:].lower().rstrip(" :=#[(")
    is_measure = bool(name) and is_metric(name, "0%" if _is_percent(bare, place) else "0")
    return not (is_measure or _NO_COUNT.search(before) or _AMOUNT.match(bare, place.end()))


def _total_place(bare: str, places: list[re.Match[str]], names: tuple[str, ...], at: int) -> int | None:
    word = names[at].split()[-1].rstrip("s") if names[at] else ""
    for index, name in enumerate(names):
        last = name.split()[-1] if name else ""
        if word and index != at and re.fullmatch(r"(?:max|total|num)_?\w+", last) and last.rstrip("s").endswith(word):
            return index
    if at + 1 >= len(places):
        return None
    return at + 1 if bare[places[at].end() : places[at + 1].start()].strip().lower() in _OF_WORDS else None

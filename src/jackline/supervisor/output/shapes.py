"""The numbers of lines that repeat: which of them counts the work, which the epochs around it, which is a total.

Owns that decision, from what each number has done so far and the words around it. Pure: no text is read here. Does
not own: how lines become shapes (learned.py), nor what the counters say about the whole run (journey.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from jackline.immutable import immutable
from jackline.supervisor.output.progress import Of

REPEATS = 3
# Only what is an epoch by its name is one before it was seen to advance with a counter that starts again.
EPOCH = re.compile(r"(?:.* )?(?:ep|eps|epochs?|epoche|epoca|época|époque)")


@dataclass
class Place:
    """What the number at one place of a line has done so far."""

    last: float
    is_count: bool  # a whole number in every line, or a share in percent
    low: float
    move: int = 0  # with the newest line: 1 it rose, -1 it fell
    rises: int = 0
    falls: int = 0
    restarts: int = 0  # falls to where it began, as a counter inside an epoch does
    peak: float = math.inf  # the least from which it started again
    leads: int = 0  # rises with a line in which another place started again
    uneven: int = 0  # rises much larger or smaller than the one before
    stride: float = 0.0
    longest: float = 0.0
    shortest: float = math.inf

    def take(self, value: float, *, is_count: bool) -> None:
        self.is_count = self.is_count and is_count
        gain = value - self.last
        self.move = (gain > 0) - (gain < 0)
        if gain > 0:
            self.rises += 1
            self.uneven += self.rises > 1 and not self.stride <= 4 * gain <= 16 * self.stride
            self.stride, self.longest = gain, max(self.longest, gain)
            self.shortest = min(self.shortest, gain)
        elif gain < 0:
            self.falls += 1
            self.restarts += value <= self.low + self.longest
            self.peak = min(self.peak, self.last)
            self.low = min(self.low, value)
        self.last = value


@immutable
class Words:
    """What stands around the numbers of a shape: the same in each of its lines."""

    names: tuple[str, ...]  # before each number, '' for none
    shares: tuple[bool, ...]  # in percent
    may_count: tuple[bool, ...]
    totals: tuple[int | None, ...]  # the place that may hold the total of each
    by_word: int | None  # the place after 'step' or 'iter'
    word: str
    things: tuple[str, ...]  # behind each number, '' for none
    aside: str
    is_trouble: bool


@immutable
class Roles:
    """Which place of a shape counts, and which holds its total and the epochs around it."""

    at: int
    outer: int | None
    is_around: bool  # a pair that has not moved yet stands before it


@dataclass
class Shape:
    began_at: int
    places: list[Place]
    count: int = 1
    words: Words | None = None
    roles: Roles | None = None

    def may_change(self) -> bool:
        """Roles are looked for again where something happened that may change them, and from time to time."""
        if self.count <= 2 * REPEATS or self.count % 8 == 0 or self.roles is None:
            return True
        outer = self.roles.outer
        return (outer is not None and self.places[outer].move != 0) or any(
            place.move < 0 and place.is_count for place in self.places
        )


def share_of(shape: Shape, roles: Roles, *, is_open: bool, is_aside: bool, is_training: bool) -> Of:
    """What a counter is a share of. `is_open`: it has no total."""
    if is_open:
        return "run"
    if is_aside:
        return "part"
    if roles.outer is not None:
        return "part" if shape.places[roles.outer].falls else "epoch"  # the epochs of one fold, then of the next
    if shape.places[roles.at].restarts:
        return "epoch"
    # Where no metric stands beside it, it may count the files before the training.
    return "run" if is_training and not roles.is_around else "part"


def find_roles(shape: Shape, words: Words) -> Roles | None:
    at = _finest(shape, words)
    return Roles(at, _outer(shape, words, at), _is_within(shape, words, at)) if at is not None else None


def _finest(shape: Shape, words: Words) -> int | None:
    """The place that counts: one with a total first, then one with a word for it, then the first in the line."""
    found = [at for at in range(len(shape.places)) if words.may_count[at] and _is_counter(shape, words, at)]
    around = {_outer(shape, words, at) for at in found}
    inner = [at for at in found if at not in around]
    return min(inner, key=lambda at: (_rank(shape, words, at), at != words.by_word, at), default=None)


def _rank(shape: Shape, words: Words, at: int) -> int:
    if words.shares[at]:
        return 1
    return 0 if total_of(shape, words, at) is not None else 2


def _is_counter(shape: Shape, words: Words, at: int) -> bool:
    """A whole number that rises with most lines. It falls only to where it began, and far less often than it rises,
    or together with the advance of a slower counter."""
    place = shape.places[at]
    if not place.is_count or (words.shares[at] and place.last > 100):
        return False
    if (place.falls - place.restarts) * 20 > place.rises:
        return False
    is_led = any(other.leads and other.leads == other.rises and other is not place for other in shape.places)
    total = total_of(shape, words, at)
    if total is not None and place.restarts and not is_led and place.peak < min(total - place.longest, 0.9 * total):
        return False  # an epoch ends with its last batch, or one print before it
    if words.shares[at]:
        return place.rises > 2 * place.restarts or (is_led and place.rises > 0)
    is_moving = 2 * (place.rises + place.restarts) >= shape.count - 1
    return is_moving and place.rises >= (1 if is_led else max(2, 2 * place.restarts))


def _outer(shape: Shape, words: Words, at: int) -> int | None:
    """The place that counts the epochs around a counter: it advances when that one starts again, and only then."""
    inner = shape.places[at]
    proven = [
        other
        for other, place in enumerate(shape.places)
        if other != at
        and place.is_count
        and place.leads
        and place.leads == place.rises
        and place.falls == place.restarts
        if words.may_count[other] and inner.restarts
    ]
    if proven:
        return max(proven, key=lambda other: shape.places[other].leads)
    named = (
        other
        for other, place in enumerate(shape.places)
        if other != at and place.is_count and not place.rises and not place.falls
        if EPOCH.fullmatch(words.names[other])
    )
    return next(named, None)


def _is_within(shape: Shape, words: Words, at: int) -> bool:
    """Whether a pair before it ('Runde 1/3') has not moved yet, so that it may be what goes around this counter."""
    for other in range(at):
        place = shape.places[other]
        total = total_of(shape, words, other)
        if (
            words.may_count[other]
            and not place.rises
            and not place.falls
            and total is not None
            and total > place.last
        ):
            return True
    return False


def total_of(shape: Shape, words: Words, at: int) -> float | None:
    """'12/100' or '12 of 100', where the second number (nearly) never changes."""
    if words.shares[at]:
        return 100.0
    other = words.totals[at]
    if other is None:
        return None
    place = shape.places[other]
    is_fixed = place.is_count and 4 * (place.rises + place.falls) <= shape.count
    return place.last if is_fixed and place.last >= shape.places[at].last else None

"""Decides what the builder does next, from plain numbers: it uses no clock and no file.

Owns: which era is built, which is recycled, when there is enough. The tokeniser stays at most a few eras ahead of
the readers and under the disk budget. The era that a reader needs soonest is built first and recycled last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jackline.data.cache.readers import Reading


@dataclass(frozen=True)
class View:
    """All that the decision depends on."""

    present: frozenset[int]
    last_era: int | None  # of the corpus, once it is known
    readers: tuple[Reading, ...]  # without readers, everything that fits is prepared
    eras_ahead: int
    budget_bytes: int
    era_bytes: Callable[[int], int]
    first_unknown_up_to: Callable[[int], int]
    is_empty_end: bool = False  # the last era has no tokens, so it has no file


@dataclass(frozen=True)
class Build:
    era: int


@dataclass(frozen=True)
class Recycle:
    era: int


@dataclass(frozen=True)
class Enough:
    """Nothing more is needed now."""


@dataclass(frozen=True)
class Full:
    """The next era does not fit. `is_needed_now`: a reader cannot continue without it."""

    era: int
    is_needed_now: bool


Action = Build | Recycle | Enough | Full


def choose_action(view: View) -> Action:
    distance = _distances(view) if view.readers else None
    target = _next_target(view, distance)
    if target is None:
        return Enough()
    era = view.first_unknown_up_to(target)
    used = sum(view.era_bytes(other) for other in view.present)
    if used + view.era_bytes(era) <= view.budget_bytes:
        return Build(era)
    how_soon = distance[target] if distance is not None else 0
    victim = _victim(view, distance, how_soon)
    return Full(era, bool(view.readers) and how_soon == 0) if victim is None else Recycle(victim)


def _distances(view: View) -> dict[int, int]:
    """For each era some reader wants: how many eras ahead of that reader it is."""
    wanted: dict[int, int] = {}
    for reader in view.readers:
        for step in range(view.eras_ahead + 1):
            era = reader.era + step
            if view.last_era is not None and era > view.last_era:
                if not reader.repeats:
                    break
                era %= view.last_era + 1
            wanted[era] = min(step, wanted.get(era, step))
        if reader.waits_for is not None:
            wanted[reader.waits_for] = 0
    return wanted


def _next_target(view: View, distance: dict[int, int] | None) -> int | None:
    last = view.last_era
    if distance is not None:
        missing = [era for era in distance if not _has(view, era)]
        return min(missing, key=lambda era: (distance[era], era), default=None)
    era = 0
    while _has(view, era):
        era += 1
    return None if last is not None and era > last else era


def _has(view: View, era: int) -> bool:
    return era in view.present or (view.is_empty_end and era == view.last_era)


def _victim(view: View, distance: dict[int, int] | None, how_soon: int) -> int | None:
    """The era on disk that is needed last, if it is needed later than the one to be built. None without readers."""
    if distance is None or not view.present:
        return None
    never = view.eras_ahead + 1
    victim = max(view.present, key=lambda era: (distance.get(era, never), -era))
    return victim if distance.get(victim, never) > how_soon else None

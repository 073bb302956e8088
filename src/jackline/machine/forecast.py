"""How fast memory grows and when it reaches its limit. Pure: takes points, returns seconds.

A point is (time in seconds, bytes used). Owns no clock and no threshold for acting: the caller decides what is soon.

The rule has no constant in seconds or bytes, so it works for a 500 MB container and a 2 TB host alike. Growth counts
as real when it was steady over a recent interval that added one and a half times as much as is still free. A program
that fills 60 % at any speed and stays there never counts as growing; one that grows steadily from nothing counts from
61 % on. In time: the warning comes when two fifths of the way from the start of the growth to the limit are left, 2 s
ahead for 200 MB/s towards 1 GB and 7.8 s ahead towards 4 GB.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, int]

_ADDED_TO_FREE = 1.55  # a little above 60/40: see the module's docstring
_BINS = 5
_LEAST_SHARE = 0.4  # share of the mean growth that every fifth of the interval must show
_SHORTEST_S = 0.5
_LEAST_POINTS = 6
_STEP_S = 0.1
_APART_S = 1e-3  # points closer together than this give no usable rate
_LONGEST_GAP_S = 2.5
_STRETCH_FACTOR = 1.15
_SEEN_BEFORE = 0.98
_DROP_SHARE = 0.2
_LEAST_GAINS = 3
_LARGEST_GAIN = 0.6  # of the whole growth
_OWN_SHARE = 0.1  # of the growth of all: with less than this, somebody else fills the memory


def seconds_to_limit(points: Sequence[Point], limit_bytes: int) -> float | None:
    """Seconds until the limit at the present rate; None when there is no steady growth towards it.

    Pass all points of about the last minute, oldest first: earlier peaks tell a saw-tooth pattern from growth.
    """
    # Below this level no interval can have added enough, so the common case returns at once.
    enough = limit_bytes * _ADDED_TO_FREE / (1 + _ADDED_TO_FREE)
    if len(points) < _LEAST_POINTS or limit_bytes <= 0 or max(used for _, used in points[-20:]) < enough:
        return None
    times, used = _fill_gaps(points)
    stretch_s = _SHORTEST_S
    while True:
        start = bisect_left(times, times[-1] - stretch_s)
        if len(times) - start >= _LEAST_POINTS:
            rate = _steady_rate(times, used, start, limit_bytes)
            if rate is not None:
                return max(0.0, (limit_bytes - used[-1]) / rate)
        if start == 0:
            return None
        stretch_s *= _STRETCH_FACTOR


def _fill_gaps(points: Sequence[Point]) -> tuple[list[float], list[int]]:
    """Make one even series from slow and fast sampling. Short gaps are interpolated linearly. Points before a long
    gap (a suspended machine, a sampler without CPU) are dropped."""
    times, used = [points[0][0]], [points[0][1]]
    for at_s, size in points[1:]:
        last_s, last = times[-1], used[-1]
        if at_s - last_s > _LONGEST_GAP_S:
            times, used = [], []
        for number in range(1, int((at_s - last_s) / _STEP_S) if times else 0):
            times.append(last_s + number * _STEP_S)
            used.append(last + round((size - last) * number * _STEP_S / (at_s - last_s)))
        times.append(at_s)
        used.append(size)
    return times, used


def _steady_rate(times: list[float], used: list[int], start: int, limit_bytes: int) -> float | None:
    """Bytes per second over the points from `start`; None when they do not show steady growth.

    Compares the peaks of five equal parts, not single points, so that a leak under a saw-tooth counts as growth.
    """
    begin_s, width_s = times[start], (times[-1] - times[start]) / _BINS
    if width_s <= 0:
        return None
    edges = [start, *(bisect_left(times, begin_s + part * width_s) for part in range(1, _BINS)), len(times)]
    if any(left >= right for left, right in pairwise(edges)):
        return None
    peaks = [max(used[left:right]) for left, right in pairwise(edges)]
    grown = peaks[-1] - peaks[0]
    steps = [after - before for before, after in pairwise(peaks)]
    if grown <= 0 or min(steps) < _LEAST_SHARE * grown / len(steps):
        return None
    if peaks[-1] - used[start] < _ADDED_TO_FREE * (limit_bytes - peaks[-1]):
        return None
    if start > 0 and max(used[:start]) >= _SEEN_BEFORE * peaks[-1]:
        return None  # memory was this high before and went down again
    if 0 < _count_drops(used[start:], _DROP_SHARE * grown) < _BINS:
        return None  # a few drops are a saw-tooth, not a leak; drops in every part can hide a leak
    return grown / (width_s * len(steps))


def _count_drops(used: list[int], least: float) -> int:
    """How often it fell by `least` from a peak; one long fall counts once."""
    drops, is_falling, turn = 0, False, used[0]
    for size in used:
        if (size <= turn) if is_falling else (size >= turn):
            turn = size
        elif abs(size - turn) > least:
            is_falling, turn = not is_falling, size
            drops += is_falling
    return drops


def is_own_growth(points: Sequence[Point], own: Sequence[Point]) -> bool:
    """Whether the processes of `own` have a part in the growth of `points`, which are all users of the memory.

    True where it cannot be told. Pages that are shared count for each process, so `own` is rather too large.
    """
    if len(points) < 2 or len(own) < 2:
        return True
    low_s, low = min(points, key=lambda point: point[1])
    grown = points[-1][1] - low
    before = next((size for at_s, size in own if at_s >= low_s), own[-1][1])
    return grown <= 0 or own[-1][1] - before >= _OWN_SHARE * grown


def has_grown_steadily(points: Sequence[Point], over_s: float = 20.0) -> bool:
    """Whether memory grew in several steps until the end. One large step is a jump, and a series that is flat until
    the kernel ends its process was one too: the line seen before a jump did not cause it."""
    if growth_bytes_per_s(points) >= 1:
        return True
    recent = [used for at_s, used in points if points[-1][0] - at_s <= over_s]
    gains = [after - before for before, after in pairwise(recent) if after > before]
    return len(gains) >= _LEAST_GAINS and max(gains) <= _LARGEST_GAIN * sum(gains) and sum(gains) > recent[-1] * 0.05


def growth_bytes_per_s(points: Sequence[Point]) -> float:
    """The typical rate: the median rate over pairs half the series apart, so that one jump or dip has no effect."""
    half = len(points) // 2
    rates = sorted(
        (later - earlier) / (after_s - before_s)
        for (before_s, earlier), (after_s, later) in zip(points, points[half:], strict=False)
        if after_s - before_s > _APART_S
    )
    return rates[len(rates) // 2] if rates else 0.0

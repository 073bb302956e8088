"""Is it making progress, busy in one place, suspect or stuck? Pure decisions over what moved.

Owns how patient the rules are with this run: its floors, and the rhythm it has shown. What moved between two samples
is `movement`, the rules are `rules`, the sentences about processes are `words`. Takes no sample itself, reads no
clock and no /proc.

What cannot be told from outside: catastrophic backtracking, an endless loop and one long call into C look alike, so
they are BUSY and never stuck; a loop that sleeps and looks at a flag looks like a hang, so it is called one late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jackline.supervisor.hang.movement import Movement, Sample, note
from jackline.supervisor.hang.rules import RULES, progress
from jackline.supervisor.hang.scene import Kind, Thresholds, Verdict, make_scene

__all__ = ["Judge", "Kind", "Sample", "Thresholds", "Verdict", "verdict"]

_MOST_STUCK_AFTER_S = 900.0  # however slow its rhythm, a run in which nothing moves this long is stuck
_MOST_SUSPECT_AFTER_S = 1800.0
_INTERVALS_TO_LEARN = 5


class Judge:
    """Holds what is known of one attempt. Add every sample, about one a second; costs microseconds a process."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._floor = thresholds or Thresholds()
        self._movement: Movement | None = None

    def add(self, sample: Sample) -> Verdict:
        self._movement = note(self._movement, sample, window_s=_window_s(self._floor))
        return decide(self._movement, self._floor)


def verdict(history: Sequence[Sample], thresholds: Thresholds) -> Verdict:
    """The verdict after all these samples; the same as a Judge that was given them one by one."""
    state: Movement | None = None
    for sample in history:
        state = note(state, sample, window_s=_window_s(thresholds))
    if state is None:
        return Verdict("PROGRESS", "STARTING", 0.0, "nothing has been seen yet")
    return decide(state, thresholds)


def _window_s(thresholds: Thresholds) -> float:
    return min(8.0, max(2.0, thresholds.stuck_after_s / 4))


def decide(state: Movement, floor: Thresholds) -> Verdict:
    """The verdict of the first rule that answers."""
    if not state.stands:
        return Verdict("PROGRESS", "ENDED", state.sample.at_s, "it has ended")
    scene = make_scene(state, learned(state, floor))
    return next((found for rule in RULES if (found := rule(scene)) is not None), None) or progress(scene)


def learned(state: Movement, floor: Thresholds) -> Thresholds:
    """Ten times the slowest rhythm seen, but not less than the floor and not absurdly much."""
    stuck_s = min(_MOST_STUCK_AFTER_S, 10 * _p99(state.progress_intervals_s))
    suspect_s = min(_MOST_SUSPECT_AFTER_S, 10 * _p99(state.output_intervals_s))
    return replace(
        floor,
        stuck_after_s=max(floor.stuck_after_s, stuck_s),
        suspect_after_s=max(floor.suspect_after_s, suspect_s),
    )


def _p99(intervals_s: Sequence[float]) -> float:
    if len(intervals_s) < _INTERVALS_TO_LEARN:
        return 0.0
    return sorted(intervals_s)[math.ceil(0.99 * len(intervals_s)) - 1]

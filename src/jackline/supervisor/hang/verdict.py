"""Decides whether a run makes progress, is busy in one place, is suspect or is stuck. Pure, from what moved.

Owns the time limits of the rules for this run: lower bounds, and what follows from the run's own intervals. Also the
format of a saved case (`why --save-case FILE`, tests/cases): the samples of a verdict and what it said, to be
replayed. `movement` tells what moved between two samples, `rules` holds the rules, `text` the sentences about
processes. Takes no sample itself, reads no clock and no /proc.

Some cases look the same from outside. Catastrophic regex backtracking, an endless loop and one long call into C do,
so they are BUSY and never stuck. A loop that sleeps and checks a flag looks like a hang, so it is reported late.
"""

from __future__ import annotations

import math
import types
import typing
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from typing import Any

from jackline.diagnosis.frames import ProcessStack
from jackline.supervisor.hang.evidence import evidence_of
from jackline.supervisor.hang.movement import Movement, note
from jackline.supervisor.hang.rules import RULES, progress
from jackline.supervisor.hang.sample import Sample
from jackline.supervisor.hang.scene import WORKER_WAITS, Kind, Scene, Thresholds, Verdict, live, make_scene
from jackline.supervisor.hang.text import work_text
from jackline.supervisor.hang.views import busiest_of, stands_at_lock

__all__ = ["Judge", "Kind", "Sample", "Thresholds", "Verdict", "verdict"]

_MOST_STUCK_AFTER_S = 900.0  # a run in which nothing moves this long is stuck, however slow it usually is
_MOST_SUSPECT_AFTER_S = 1800.0
_INTERVALS_TO_LEARN = 5
KEPT_SAMPLES = 180
KEPT_READINGS = 1200  # of processes: about 2 MB


class Judge:
    """Holds what is known about one attempt. Add every sample, about one a second; costs microseconds per process."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._floor = thresholds or Thresholds()
        self._movement: Movement | None = None
        self._verdict: Verdict | None = None
        self._scene: Scene | None = None
        self._samples: deque[Sample] = deque()
        self._num_kept = 0  # readings of processes in them

    def add(self, sample: Sample) -> Verdict:
        self._keep(sample)
        self._movement = note(self._movement, sample, window_s=_window_s(self._floor))
        # Kept, because several questions about it are asked each second.
        self._scene = _scene_of(self._movement, self._floor)
        self._verdict = _decide(self._scene) if self._scene else _ended(self._movement)
        return self._verdict

    def _keep(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._num_kept += len(sample.tree.processes)
        while len(self._samples) > KEPT_SAMPLES or self._num_kept > KEPT_READINGS:
            self._num_kept -= len(self._samples.popleft().tree.processes)

    def evidence(self) -> dict[str, Any]:
        """What the newest verdict rests on."""
        if self._scene is None or self._verdict is None:
            return {}
        return evidence_of(self._scene, self._verdict)

    def case(self, verdict: Verdict) -> dict[str, Any]:
        """The samples that led to the verdict, to be replayed later."""
        return case_json(list(self._samples), self._floor, verdict)

    def stands_since_s(self) -> float | None:
        """Since when it has been worth asking who waits for whom: the main thread waits for something inside the
        process and has not moved, a thread stands at a lock of the user's, or nothing moves at all. None when nothing
        is known yet."""
        if self._scene is None:
            return None
        state, leader = self._scene.state, self._scene.leader
        locked = [since_s for view in state.views.values() if (since_s := stands_at_lock(view)) is not None]
        is_inside = leader.reading.wait.kind in ("lock", "file_lock")
        return min([leader.moved_at_s if is_inside else state.progress_at_s, *locked])

    def stack_of(self, pid: int) -> ProcessStack | None:
        """The newest stack of a process, with what was read from inside it."""
        view = self._movement.views.get(pid) if self._movement else None
        return view.stack if view else None

    def at_work(self) -> str:
        """Which process works while the main thread of the leading one waits, and at which line."""
        if self._scene is None or self._scene.leader.reading.wait.kind not in (*WORKER_WAITS, "lock"):
            return ""
        found = busiest_of(live(self._scene.workers))
        return work_text(found, is_short=True) if found else ""

    def has_proof(self) -> bool:
        return self._movement is not None and self._movement.deadlock is not None

    def ran_since(self, since_s: float) -> frozenset[tuple[int, int]]:
        """The threads that have run since then."""
        views = self._movement.views if self._movement else {}
        return frozenset(
            (pid, tid) for pid, view in views.items() for tid, at_s in view.ran_at_s.items() if at_s > since_s
        )

    @property
    def leader_pid(self) -> int | None:
        return self._scene.leader.reading.pid if self._scene else None


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
    scene = _scene_of(state, floor)
    return _decide(scene) if scene else _ended(state)


def _scene_of(state: Movement, floor: Thresholds) -> Scene | None:
    return make_scene(state, learned(state, floor)) if state.views else None


def _ended(state: Movement) -> Verdict:
    return Verdict("PROGRESS", "ENDED", state.sample.at_s, "it has ended")


def _decide(scene: Scene) -> Verdict:
    """The verdict of the first rule that returns one."""
    for rule in (*RULES, progress):
        found = rule(scene)
        if found is not None:
            return replace(found, rule=rule.__name__)
    return progress(scene)


def learned(state: Movement, floor: Thresholds) -> Thresholds:
    """Limits of ten times the slowest interval seen (99th percentile), between the floor and a maximum."""
    stuck_s = min(_MOST_STUCK_AFTER_S, 10 * _p99(state.progress_intervals_s))
    suspect_s = min(_MOST_SUSPECT_AFTER_S, 10 * _p99(state.output_intervals_s))
    return replace(
        floor,
        stuck_after_s=max(floor.stuck_after_s, stuck_s),
        suspect_after_s=max(floor.suspect_after_s, suspect_s),
    )


def _p99(intervals_s: Sequence[float]) -> float:
    """Without the longest one: a pause that came once (a slow import, a download) says nothing about later ones."""
    num = len(intervals_s)
    return sorted(intervals_s)[min(math.ceil(0.99 * num) - 1, num - 2)] if num >= _INTERVALS_TO_LEARN else 0.0


FORMAT = 1


def case_json(samples: Sequence[Sample], thresholds: Thresholds, verdict: Verdict) -> dict[str, Any]:
    said = {"kind": verdict.kind, "label": verdict.label, "rule": verdict.rule, "text": verdict.text}
    return {
        "format": FORMAT,
        "thresholds": asdict(thresholds),
        "said": said,
        "samples": [_plain(sample) for sample in samples],
    }


def read_case(raw: Mapping[str, Any]) -> tuple[list[Sample], Thresholds, dict[str, str]]:
    """(samples, thresholds, what was said). Raises ValueError when it is not a case of this format."""
    if raw.get("format") != FORMAT or not isinstance(raw.get("samples"), list):
        raise ValueError("this is not a saved case of format 1")
    try:
        samples = [_build(Sample, sample) for sample in raw["samples"]]
        return samples, _build(Thresholds, raw["thresholds"]), dict(raw["said"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the saved case is damaged: {error}") from error


def _plain(value: Any) -> Any:
    """Dataclasses without fields that have their default value: a case is kept small."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {}
        for part in fields(value):
            found = getattr(value, part.name)
            default = part.default_factory() if part.default_factory is not MISSING else part.default
            if found != default or part.default is MISSING:
                parts[part.name] = _plain(found)
        return parts
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list | frozenset | set):
        return [_plain(entry) for entry in (sorted(value) if isinstance(value, frozenset | set) else value)]
    return value


def _build(kind: Any, value: Any) -> Any:
    """The opposite of `_plain`, by the annotations of the dataclasses."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _build(hints[name], entry) for name, entry in value.items() if name in hints})
    if value is None or kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _build(next(part for part in parts if part is not type(None)), value)
    if origin is tuple:
        inner = parts[:1] * len(value) if len(parts) == 2 and parts[1] is Ellipsis else parts
        return tuple(_build(part, entry) for part, entry in zip(inner, value, strict=True))
    if origin is frozenset:
        return frozenset(_build(parts[0], entry) for entry in value)
    if isinstance(value, dict):  # a mapping from numbers
        return {int(key): _build(parts[1], entry) for key, entry in value.items()}
    return value

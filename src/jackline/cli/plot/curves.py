"""Which curves of a run are drawn: its metrics by what they tell, throughput from the times, memory as it was seen.

Owns the choice and the common axis. Does not own: reading the files (rundir/records/metrics), drawing (canvas.py).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from jackline.cli.plot.canvas import Curve
from jackline.cli.view.live_line import is_evaluation
from jackline.immutable import immutable
from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import Point, Series, read_series
from jackline.rundir.records.timeline import read_timeline

Axis = Literal["step", "time", "epoch"]
MAX_BYTES = 2 << 20  # of a longer file parts are read, evenly spread
_RATES: tuple[str, ...] = ("tokens_per_s", "samples_per_s", "throughput", "steps_per_s")
_LR = ("lr", "learning_rate", "learning-rate")
_MEMORY: tuple[str, ...] = ("gpu_gib", "ram_gib")
_GIB = 2**30
_RATE_WINDOW = 200  # points of a throughput curve


@immutable
class Panel:
    """Curves that share an axis: one for each run, or one for training and one for evaluation."""

    title: str
    curves: tuple[Curve, ...]


@immutable
class RunCurves:
    name: str
    path: str
    series: tuple[Series, ...]


def read_run_curves(run: RunDir, name: str) -> RunCurves:
    """All metrics of a run, with its throughput and its memory."""
    known = list(read_series(run, max_bytes=MAX_BYTES))
    names = {series.name for series in known}
    rate = throughput(known) if not names & set(_RATES) else None
    known += [rate] if rate is not None else []
    known += [series for series in memory(run) if series.name not in names]
    return RunCurves(name, str(run.path), tuple(_on_steps(known)))


def memory(run: RunDir) -> list[Series]:
    """What the supervisor saw: of the host, and of the GPUs together, in GiB."""
    lines = read_timeline(run)
    found = []
    for name, values in (
        (_MEMORY[0], [(line.at_s, line.gpu_bytes) for line in lines]),
        (_MEMORY[1], [(line.at_s, line.used_bytes) for line in lines]),
    ):
        points = tuple(Point(value / _GIB, None, at_s) for at_s, value in values if value)
        found += [Series(name, points, "timeline")] if points else []
    return found


def throughput(series: Sequence[Series]) -> Series | None:
    """Steps a second, from the times of the longest series that counts steps."""
    counted = [one for one in series if sum(p.step is not None and p.at_s is not None for p in one.points) >= 3]
    if not counted:
        return None
    points = [
        p for p in max(counted, key=lambda one: len(one.points)).points if p.step is not None and p.at_s is not None
    ]
    stride = max(1, len(points) // _RATE_WINDOW)
    found = []
    for before, now in zip(points[::stride], points[stride::stride], strict=False):
        seconds = (now.at_s or 0.0) - (before.at_s or 0.0)
        steps = (now.step or 0.0) - (before.step or 0.0)
        if seconds > 0 and steps > 0:
            found.append(Point(steps / seconds, now.step, now.at_s, now.epoch))
    return Series("steps_per_s", tuple(found), "derived") if found else None


def _on_steps(series: Sequence[Series]) -> list[Series]:
    """Points without a step get the step that the run had at their time."""
    clock = sorted(
        {(p.at_s, p.step) for one in series for p in one.points if p.at_s is not None and p.step is not None}
    )
    if not clock:
        return list(series)
    times, steps = [at_s for at_s, _ in clock], [step for _, step in clock]

    def placed(point: Point) -> Point:
        if point.step is not None or point.at_s is None:
            return point
        at = bisect_right(times, point.at_s) - 1
        return Point(point.value, steps[max(0, at)], point.at_s, point.epoch)

    return [Series(one.name, tuple(map(placed, one.points)), one.source, one.is_guessed) for one in series]


def choose(runs: Sequence[RunCurves], wanted: Sequence[str]) -> list[list[str]]:
    """The names of each drawing: those asked for, or loss with its evaluation, learning rate, throughput, memory."""
    names = list(dict.fromkeys(series.name for run in runs for series in run.series))
    if wanted:
        return [[name for name in names if _is_meant(name, word)] for word in wanted]
    losses = [name for name in names if "loss" in name.lower()]
    panels = [_first(losses, is_eval=False) + _first(losses, is_eval=True)]
    if not panels[0]:
        others = [name for name in names if name not in (*_MEMORY, *_RATES, *_LR)]
        panels = [others[:1]]
    panels.append([name for name in names if name.lower() in _LR][:1])
    panels.append([name for name in _RATES if name in names][:1])
    panels.append([name for name in _MEMORY if name in names][:1])
    return [panel for panel in panels if panel]


def _first(names: Sequence[str], *, is_eval: bool) -> list[str]:
    found = [name for name in names if is_evaluation(name) == is_eval]
    exact = [name for name in found if name.lower() in ("loss", "train_loss", "train/loss", "val_loss", "eval_loss")]
    return (exact or found)[:1]


def _is_meant(name: str, word: str) -> bool:
    """A whole name, or with * any part of it."""
    from fnmatch import fnmatchcase

    return fnmatchcase(name.lower(), word.lower())


def panel_of(runs: Sequence[RunCurves], names: Sequence[str], axis: Axis) -> Panel:
    """One curve for each run and name. The names of the curves say only what differs."""
    curves = []
    for run in runs:
        for series in run.series:
            if series.name in names:
                label = [run.name] if len(runs) > 1 else []
                label += [series.name] if len(names) > 1 or not label else []
                curves.append(Curve(" ".join(label), _points(series, axis)))
    return Panel(" / ".join(names), tuple(curve for curve in curves if curve.points))


def _points(series: Series, axis: Axis) -> tuple[tuple[float, float], ...]:
    if axis == "time":
        known = [(p.at_s, p.value) for p in series.points if p.at_s is not None]
        start = min((at_s for at_s, _ in known), default=0.0)
        return tuple(sorted((at_s - start, value) for at_s, value in known))
    if axis == "epoch":
        return tuple((p.epoch, p.value) for p in series.points if p.epoch is not None)
    counted = [(p.step, p.value) for p in series.points if p.step is not None]
    if counted:
        return tuple((step, value) for step, value in counted if step is not None)
    return tuple((float(at), p.value) for at, p in enumerate(series.points))  # it printed no count: in their order


def summary(curve: Curve) -> tuple[float, float, float, float] | None:
    """The last value, the lowest and the highest, and where the lowest is; None without a finite value."""
    finite = [(x, y) for x, y in curve.points if math.isfinite(y)]
    if not finite:
        return None
    lowest = min(finite, key=lambda point: point[1])
    return finite[-1][1], lowest[1], max(y for _, y in finite), lowest[0]

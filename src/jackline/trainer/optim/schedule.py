"""The learning rate of every optimizer step, as a pure function of the step's number.

Owns warm-up + cosine, constant, warm-up + stable + decay ("wsd"), one-cycle, and how they are shown. Steps count
optimizer steps, never micro-batches: step 0 is the first update. Nothing here is stateful, so a resumed run cannot be
one step off, and the rate in use can be held against `lr_at` at any time (watch.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from jackline.errors import UsageError

KINDS = ("cosine", "constant", "wsd", "one-cycle")
ONE_CYCLE_RISE, ONE_CYCLE_FIRST = 0.3, 1 / 25  # share of the steps, and of lr
DEFAULT_DECAY_SHARE = 0.1  # of a wsd run


@dataclass(frozen=True)
class Schedule:
    """`min_lr` is the floor and the rate of the last step. `decay_steps` 0: all that is left after the warm-up for
    cosine, the last tenth for wsd; constant has no decay."""

    kind: str
    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    total_steps: int = 1
    decay_steps: int = 0
    begins_at: int = 0  # the step of the run that is its first one; `total_steps` counts from there

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            near = get_close_matches(self.kind, KINDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else None
            raise UsageError(f"schedule is one of {', '.join(KINDS)}, not '{self.kind}'", hint=hint)
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise UsageError(f"lr={self.lr:g} is not above 0")
        if not 0 <= self.min_lr <= self.lr:
            raise UsageError(
                f"min_lr={self.min_lr:g} is not between 0 and lr={self.lr:g}", hint=f"min_lr={self.lr / 10:g}"
            )
        if self.total_steps < 1:
            raise UsageError(f"max_steps={self.total_steps} is not above 0")
        if self.warmup_steps < 0 or self.decay_steps < 0:
            raise UsageError("warmup_steps and decay_steps cannot be negative")
        if self.decay_steps and self.warmup_steps + self.decay_steps > self.total_steps:
            raise UsageError(
                f"warmup_steps={self.warmup_steps} and decay_steps={self.decay_steps} together are more than"
                f" max_steps={self.total_steps}",
                hint=f"decay_steps={max(0, self.total_steps - self.warmup_steps)}",
            )

    @property
    def is_warm_up_cut(self) -> bool:
        """The run ends before the warm-up does, as a short trial of a long recipe: `lr` is never reached."""
        return self.warmup_steps >= self.total_steps

    @property
    def decay(self) -> range:
        """The steps over which the rate falls from `lr` to `min_lr`; empty for constant."""
        if self.kind == "constant":
            return range(self.total_steps, self.total_steps)
        if self.kind == "one-cycle":
            return range(min(self.rise_steps, self.total_steps - 1), self.total_steps)
        rest = max(0, self.total_steps - self.warmup_steps)
        if self.kind == "cosine":
            return range(self.warmup_steps, self.warmup_steps + (self.decay_steps or rest))
        steps = min(rest, self.decay_steps or max(1, round(DEFAULT_DECAY_SHARE * self.total_steps)))
        return range(self.total_steps - steps, self.total_steps)

    @property
    def rise_steps(self) -> int:
        """Of one-cycle: the steps before the highest rate."""
        return self.warmup_steps or round(ONE_CYCLE_RISE * self.total_steps)


class HasSchedule(Protocol):
    """The fields of a config that decide the learning rate."""

    @property
    def schedule(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def min_lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def decay_steps(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def schedule_start(self) -> int: ...


def schedule_of(config: HasSchedule, total_steps: int | None = None) -> Schedule:
    """The schedule a config asks for. `total_steps`: when it is counted in epochs, and so known only now."""
    total = config.max_steps if total_steps is None else total_steps
    if config.schedule_start >= total:
        raise UsageError(
            f"schedule_start={config.schedule_start} is not before the last step: there are {total}",
            hint="more max_steps, or schedule_start=0",
        )
    return Schedule(
        kind=config.schedule,
        lr=config.lr,
        min_lr=config.min_lr,
        warmup_steps=config.warmup_steps,
        total_steps=total - config.schedule_start,
        decay_steps=config.decay_steps,
        begins_at=config.schedule_start,
    )


def lr_at(step: int, s: Schedule) -> float:
    """The rate of optimizer step `step` of the run, from 0."""
    return _rate(max(0, step - s.begins_at), s)


def _rate(step: int, s: Schedule) -> float:
    """Of the schedule's own steps. Reaches `lr` at step `warmup_steps` and `min_lr` at the last."""
    if s.kind == "one-cycle" and step < s.rise_steps:
        rise = 0.5 * (1 - math.cos(math.pi * step / s.rise_steps))
        return s.lr * (ONE_CYCLE_FIRST + (1 - ONE_CYCLE_FIRST) * rise)
    if step < s.warmup_steps:
        return s.lr * (step + 1) / (s.warmup_steps + 1)
    decay = s.decay
    if not len(decay) or step < decay.start:
        return s.lr
    if step >= decay[-1]:
        # Also the only step of a decay of one.
        return s.min_lr
    share = (step - decay.start) / (len(decay) - 1)
    left = 0.5 * (1 + math.cos(math.pi * share)) if s.kind != "wsd" else 1 - share
    return s.min_lr + (s.lr - s.min_lr) * left


@dataclass(frozen=True)
class Point:
    name: str
    step: int
    lr: float


def key_points(s: Schedule) -> tuple[Point, ...]:
    """Where a person looks: first step, end of warm-up, middle, begin of the decay, last step."""
    places = [("first step", 0)]
    if s.warmup_steps and not s.is_warm_up_cut:
        places.append(("end of warm-up", s.warmup_steps))
    places.append(("middle", s.total_steps // 2))
    if s.kind == "wsd" and len(s.decay):
        places.append(("decay begins", s.decay.start))
    places.append(("last step", s.total_steps - 1))
    return tuple(Point(name, step + s.begins_at, _rate(step, s)) for name, step in places)


def describe_schedule(s: Schedule) -> str:
    """'cosine: 100 steps of warm-up to 3e-04, then down to the floor of 3e-05 at step 9,999'."""
    anew = f" (begun anew at step {s.begins_at:,})" if s.begins_at else ""
    return f"{s.kind}{anew}: {_course(s)}"


def _course(s: Schedule) -> str:
    first = s.begins_at
    if s.is_warm_up_cut:
        reached = _rate(s.total_steps - 1, s)
        return (
            f"warm-up only: it would take {s.warmup_steps:,} steps to {s.lr:.3g}, the run ends at"
            f" {reached:.3g} after {s.total_steps:,}"
        )
    if s.kind == "one-cycle":
        up = f"from {s.lr * ONE_CYCLE_FIRST:.3g} up to {s.lr:.3g} at step {first + s.rise_steps:,}"
        return f"{up}, then down to {s.min_lr:.3g} at step {first + s.decay[-1]:,}"
    warm = f"{s.warmup_steps:,} steps of warm-up to {s.lr:.3g}" if s.warmup_steps else f"{s.lr:.3g} from the start"
    if s.kind == "constant":
        return warm + (", then unchanged" if s.warmup_steps else "")
    if s.kind == "cosine":
        return f"{warm}, then down to the floor of {s.min_lr:.3g} at step {first + s.decay[-1]:,}"
    stable = f"{warm}, unchanged to step {first + s.decay.start:,}"
    return f"{stable}, then down to {s.min_lr:.3g} at step {first + s.decay[-1]:,}"


def plot_lines(s: Schedule, *, width: int = 60, height: int = 6) -> list[str]:
    """The whole curve in a few lines of text: rate upwards, steps to the right."""
    last = s.total_steps - 1
    columns = min(width, s.total_steps)
    steps = [round(last * column / max(1, columns - 1)) for column in range(columns)]
    # Never over the curve's own top, so that the short warm-up between two columns still shows the peak's height.
    rows = [round((height - 1) * _rate(step, s) / s.lr) for step in steps]
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{s.lr:.1e}" if row == height - 1 else f"{s.lr * row / (height - 1):.1e}" if row == 0 else ""
        lines.append(f"{label:>8} |" + "".join("*" if at == row else " " for at in rows).rstrip())
    name, first = f"step {s.begins_at + last:,}", f"{s.begins_at:,}"
    lines.append(f"{'':>8} +" + "-" * columns)
    lines.append(f"{'':>9} {first}" + name.rjust(max(columns - len(first), len(name) + 1)))
    return lines

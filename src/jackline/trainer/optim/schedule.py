"""The learning rate of every optimizer step, as a pure function of the step's number.

Owns warm-up + cosine, constant, and warm-up + stable + decay ("wsd"), and how they are shown. Steps count optimizer
steps, never micro-batches: step 0 is the first update. Nothing here is stateful, so a resumed run cannot be one step
off, and the rate in use can be held against `lr_at` at any time (watch.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from jackline.errors import UsageError

KINDS = ("cosine", "constant", "wsd")
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
        rest = max(0, self.total_steps - self.warmup_steps)
        if self.kind == "cosine":
            return range(self.warmup_steps, self.warmup_steps + (self.decay_steps or rest))
        steps = min(rest, self.decay_steps or max(1, round(DEFAULT_DECAY_SHARE * self.total_steps)))
        return range(self.total_steps - steps, self.total_steps)


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


def schedule_of(config: HasSchedule, total_steps: int | None = None) -> Schedule:
    """The schedule a config asks for. `total_steps`: when it is counted in epochs, and so known only now."""
    return Schedule(
        kind=config.schedule,
        lr=config.lr,
        min_lr=config.min_lr,
        warmup_steps=config.warmup_steps,
        total_steps=config.max_steps if total_steps is None else total_steps,
        decay_steps=config.decay_steps,
    )


def lr_at(step: int, s: Schedule) -> float:
    """The rate of optimizer step `step`, from 0. Reaches `lr` at step `warmup_steps` and `min_lr` at the last."""
    if step < s.warmup_steps:
        return s.lr * (step + 1) / (s.warmup_steps + 1)
    decay = s.decay
    if not len(decay) or step < decay.start:
        return s.lr
    if step >= decay[-1]:
        # Also the only step of a decay of one.
        return s.min_lr
    share = (step - decay.start) / (len(decay) - 1)
    left = 0.5 * (1 + math.cos(math.pi * share)) if s.kind == "cosine" else 1 - share
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
    return tuple(Point(name, step, lr_at(step, s)) for name, step in places)


def describe_schedule(s: Schedule) -> str:
    """'cosine: 100 steps of warm-up to 3e-04, then down to the floor of 3e-05 at step 9,999'."""
    if s.is_warm_up_cut:
        reached = lr_at(s.total_steps - 1, s)
        return (
            f"{s.kind}: warm-up only: it would take {s.warmup_steps:,} steps to {s.lr:.3g}, the run ends at"
            f" {reached:.3g} after {s.total_steps:,}"
        )
    warm = f"{s.warmup_steps:,} steps of warm-up to {s.lr:.3g}" if s.warmup_steps else f"{s.lr:.3g} from the start"
    if s.kind == "constant":
        return f"constant: {warm}" + (", then unchanged" if s.warmup_steps else "")
    if s.kind == "cosine":
        return f"cosine: {warm}, then down to the floor of {s.min_lr:.3g} at step {s.decay[-1]:,}"
    return f"wsd: {warm}, unchanged to step {s.decay.start:,}, then down to {s.min_lr:.3g} at step {s.decay[-1]:,}"


def plot_lines(s: Schedule, *, width: int = 60, height: int = 6) -> list[str]:
    """The whole curve in a few lines of text: rate upwards, steps to the right."""
    last = s.total_steps - 1
    columns = min(width, s.total_steps)
    steps = [round(last * column / max(1, columns - 1)) for column in range(columns)]
    # Never over the curve's own top, so that the short warm-up between two columns still shows the peak's height.
    rows = [round((height - 1) * lr_at(step, s) / s.lr) for step in steps]
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{s.lr:.1e}" if row == height - 1 else f"{s.lr * row / (height - 1):.1e}" if row == 0 else ""
        lines.append(f"{label:>8} |" + "".join("*" if at == row else " " for at in rows).rstrip())
    name = f"step {last:,}"
    lines.append(f"{'':>8} +" + "-" * columns)
    lines.append(f"{'':>9} 0" + name.rjust(max(columns - 1, len(name) + 1)))
    return lines

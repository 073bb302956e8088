"""Is it making progress, busy in one place, suspect or stuck? Pure decisions over samples.

Owns the four verdicts, their thresholds and the sentence for people. What moved between two samples is `movement`.
Takes no sample itself, reads no clock and no /proc.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jackline.diagnosis.frames import Frame, ProcessStack
from jackline.machine.readings import GpuReading, TreeReading

Kind = Literal["PROGRESS", "BUSY", "SUSPECT", "STUCK"]


@dataclass(frozen=True)
class Sample:
    """Everything seen at one instant. `stacks` only when they were taken then; `late_s` is how late the supervisor
    came (a paused machine)."""

    at_s: float
    late_s: float
    tree: TreeReading
    gpus: tuple[GpuReading, ...] = ()
    output_bytes: int = 0
    marks: int = 0
    stacks: tuple[ProcessStack, ...] | None = None


@dataclass(frozen=True)
class Thresholds:
    suspect_after_s: float = 120.0
    stuck_after_s: float = 60.0
    keyboard_after_s: float = 5.0


@dataclass(frozen=True)
class Verdict:
    """`since_s` is for how long it has been so. `frame` is where the main process stands in the person's code,
    `pid` the process at fault: a worker when the main process only waits for it."""

    kind: Kind
    label: str
    since_s: float
    text: str
    frame: Frame | None = None
    pid: int | None = None


def verdict(history: Sequence[Sample], thresholds: Thresholds) -> Verdict:
    return Verdict("PROGRESS", "STARTING", 0.0, "starting")


class Judge:
    """Holds the rolling window of one attempt. `observe` each sample, about one a second."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._floor = thresholds or Thresholds()

    def observe(self, sample: Sample) -> Verdict:
        return verdict((sample,), self._floor)

"""One sample of a run, the input of the verdict: everything that was measured at one time. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from jackline.diagnosis.frames import ProcessStack
from jackline.machine.readings import GpuReading, TreeReading
from jackline.supervisor.hang.deadlock import Deadlock
from jackline.supervisor.stacks.flight import Flight


@dataclass(frozen=True, slots=True)
class FarRank:
    """A rank of the same job on another machine, as the supervisor there saw it `age_s` ago."""

    rank: int
    machine: str
    what: str
    place: str
    is_waiting: bool  # in a collective
    age_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """All readings at one time. `stacks` is set only if stacks were taken then; `late_s` is how late the supervisor
    took it (large after a suspend); `marks` counts signs of progress: bars, protocol lines, checkpoints. `disturbed`
    are the processes that a stack reader of ours has stopped or signalled since the last sample. `was_asked`: the
    processes were asked who waits for whom, and `deadlock` is what that proved, `flight` what
    the flight recorders of several ranks say."""

    at_s: float
    late_s: float
    tree: TreeReading
    gpus: tuple[GpuReading, ...] = ()
    output_bytes: int = 0
    marks: int = 0
    stacks: tuple[ProcessStack, ...] | None = None
    disturbed: frozenset[int] = frozenset()
    was_asked: bool = False
    deadlock: Deadlock | None = None
    flight: Flight | None = None
    elsewhere: tuple[FarRank, ...] | None = None  # ranks of other machines; None: not known
    rescued: frozenset[int] = frozenset()  # processes that we let save their state because they are stuck

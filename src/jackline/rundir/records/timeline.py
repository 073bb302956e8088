"""A line of timeline.jsonl: what the run was doing at one moment, and what it used.

Written by the supervisor when that changes, and from time to time when it does not. A line holds until the next one
of the same attempt. Charts of memory and speed, the bar of attempts and phases, and goodput are made from it.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from jackline.immutable import immutable
from jackline.rundir.jsonl import read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import decode, encode, left_out

MAX_BYTES = 32 << 20


@immutable
class TimelineRecord:
    """`phase`, `step` and `spent_s` are the session's or, for a script without one, what its output tells. `what` is
    read from the stacks. `step` is None while something else is counted, such as bytes of data that are prepared.
    `is_part`: `step` counts one epoch or one bar, not the run. `still_s`: with an alarm, for how long nothing had
    moved. `is_last`: the attempt is over."""

    at_s: float | None = None
    attempt: int | None = None
    verdict: str | None = None
    phase: str | None = left_out()
    what: str | None = left_out()
    step: float | None = left_out()
    total: float | None = left_out()
    spent_s: dict[str, float] = field(default_factory=dict)
    still_s: float | None = left_out()
    used_bytes: int | None = left_out()
    gpu_bytes: int | None = left_out()
    cpu_cores: float | None = left_out()
    is_last: bool | None = left_out()
    is_part: bool | None = left_out()

    @property
    def run_step(self) -> float | None:
        """`step` where it counts through the whole run."""
        return None if self.is_part else self.step

    @staticmethod
    def from_json(raw: object) -> TimelineRecord:
        return decode(TimelineRecord, raw)

    def to_json(self) -> dict[str, Any]:
        found = encode(self)
        if not self.spent_s:
            found.pop("spent_s")
        return found


def read_timeline(run: RunDir) -> tuple[TimelineRecord, ...]:
    """In the order of time; a line without a time or an attempt is left out."""
    lines = read_lines(run.timeline, max_bytes=MAX_BYTES).records
    found = (TimelineRecord.from_json(line) for line in lines)
    known = (line for line in found if line.at_s is not None and line.attempt is not None)
    return tuple(sorted(known, key=lambda line: (line.attempt or 0, line.at_s or 0.0)))

"""skipped-batches.json: batches that a person took out of a run (`jackline resume --skip-batches A:B`).

Batches are counted over the whole run, the first is 0, as checkpoints count them. The list only grows: an attempt
that resumes before such batches leaves them out again, so the order is the same however often the run is restarted.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from jackline.errors import UsageError
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import decode, each, encode

MAX_RANGES = 100


@dataclass(frozen=True)
class Skip:
    """Batches `first` up to `end`, without `end`. `step`: the checkpoint that was gone back to, if one was."""

    first: int | None = None
    end: int | None = None
    at_s: float | None = None
    step: str | None = None

    @staticmethod
    def from_json(raw: object) -> Skip:
        return decode(Skip, raw)

    def covers(self, number: int) -> bool:
        return self.first is not None and self.end is not None and self.first <= number < self.end

    def __str__(self) -> str:
        return f"{self.first}:{self.end}"


@dataclass(frozen=True)
class SkippedBatches:
    ranges: tuple[Skip, ...] = ()

    @staticmethod
    def from_json(raw: object) -> SkippedBatches:
        found = decode(SkippedBatches, raw, {"tuple[Skip, ...]": each(Skip.from_json)})
        known = [skip for skip in found.ranges if skip.first is not None and skip.end is not None]
        return SkippedBatches(tuple(known[:MAX_RANGES]))

    def to_json(self) -> dict[str, Any]:
        return encode(self)

    def covers(self, number: int) -> bool:
        return any(skip.covers(number) for skip in self.ranges)

    @property
    def first(self) -> int | None:
        """The first batch that is left out."""
        return min((skip.first for skip in self.ranges if skip.first is not None), default=None)

    def __str__(self) -> str:
        return ", ".join(map(str, self.ranges))


def read_skipped(run: RunDir) -> SkippedBatches:
    return SkippedBatches.from_json(atomic.read_json(run.skipped_file))


def parse_skip(text: str) -> Skip:
    """'120:140' are the batches 120 to 139 of the run; the first batch is 0."""
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(
            f"--skip-batches {text!r} is no range of batches",
            hint="120:140 leaves out the batches 120 to 139 of the run; its first batch is 0",
        )
    return Skip(int(match[1]), int(match[2]))


def add_skip(run: RunDir, skip: Skip, step: str | None) -> SkippedBatches:
    """Write it down, durably, before the attempt starts that will leave them out."""
    known = read_skipped(run)
    if len(known.ranges) >= MAX_RANGES:
        raise UsageError(f"run '{run.name}' leaves out {MAX_RANGES} ranges of batches already")
    whole = SkippedBatches((*known.ranges, Skip(skip.first, skip.end, time.time(), step)))
    atomic.write_json(run.skipped_file, whole.to_json(), durable=True)
    return whole

"""memory.json: what a rehearsal before step 0 measured against the plan, and what it was measured for."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.records.fields import decode, encode

_PLAUSIBLE = (0.2, 5.0)  # a plan that is off by more than this was of something else


@immutable
class RehearsedRecord:
    """What a rehearsal found, and for which device and settings that is true."""

    device: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    step_s: float | None = None
    reserved_bytes: int | None = None
    window_s: float | None = None

    @property
    def is_whole(self) -> bool:
        numbers = (self.micro_batch, self.step_s, self.reserved_bytes, self.window_s)
        return all(number is not None and number >= 0 for number in numbers) and bool(self.micro_batch)


@immutable
class MemoryRecord:
    """`measured`: peaks for each act of the rehearsal. `correction`: measured over predicted, for the next plan."""

    micro_batch: int | None = None
    predicted_allocated_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    measured_allocated_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    failed_act: str | None = None
    correction: float | None = None
    rehearsed: RehearsedRecord = RehearsedRecord()

    @staticmethod
    def from_json(raw: object) -> MemoryRecord:
        return decode(MemoryRecord, raw, {"RehearsedRecord": lambda value: decode(RehearsedRecord, value)})

    def to_json(self) -> dict[str, Any]:
        return encode(self)

    @property
    def usable_correction(self) -> float | None:
        low, high = _PLAUSIBLE
        return self.correction if self.correction is not None and low < self.correction < high else None


def read_memory(run: RunDir) -> MemoryRecord:
    return MemoryRecord.from_json(atomic.read_json(run.memory_file))


def write_memory(run: RunDir, record: MemoryRecord) -> None:
    atomic.write_json(run.memory_file, record.to_json())

"""session-RANK.json: the training's progress, replaced each second by the session inside the training process."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId
from jackline.rundir.records.fields import decode, each, encode, left_out
from jackline.rundir.records.supervisor import GpuUserRecord, ProgressRecord


@immutable
class PlaceRecord:
    """The epoch and the batch, each with its total, counted from 1."""

    epoch: int | None = None
    epochs: int | None = None
    batch: int | None = None
    num_batches: int | None = None


@immutable
class BestRecord:
    """The best checkpoint that is kept, and the metric that decided it."""

    name: str | None = None
    step: int | None = None
    value: float | None = None


@immutable
class LossBoundsRecord:
    """How much work is lost if the process is killed now, and if the machine is lost."""

    process_s: float | None = None
    machine_s: float | None = None
    text: str | None = None
    note: str | None = left_out()


@immutable
class SavedRecord:
    """The newest checkpoint of the session."""

    step: int | None = None
    at_s: float | None = None
    path: str | None = None


@immutable
class OomRecord:
    """The last time a GPU's memory ran out."""

    step: int | None = None
    micro_batch: int | None = None
    shape: str | None = None
    wanted_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    parts: dict[str, float] = field(default_factory=dict)
    new_micro_batch: int | None = None
    fitting_micro_batch: int | None = None
    needs_new_process: bool | None = None
    others: tuple[GpuUserRecord, ...] = ()
    phase: str | None = None
    text: str | None = None


@immutable
class GpuBooksRecord:
    """The memory statistics of PyTorch's allocator for this process."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None


@immutable
class HostGuardRecord:
    """Host memory, as measured by the session's memory guard."""

    used_bytes: int | None = None
    limit_bytes: int | None = None
    seconds_to_limit: float | None = None
    grows_at: str | None = None
    growing_frame: dict[str, Any] | None = None
    num_workers: int | None = None
    prefetch: int | None = None


@immutable
class SessionMemoryRecord:
    """Memory of the training process. `gpu` is the GPU, if there is one."""

    micro_batch: int | None = None
    num_shrinks: int | None = None
    last_oom: OomRecord = OomRecord()
    gpu: GpuBooksRecord = GpuBooksRecord()
    host: HostGuardRecord = HostGuardRecord()


def _part(record: Any, own: Any = None) -> Any:
    return lambda value: decode(record, value, own)


_OF_MEMORY = {
    "OomRecord": _part(OomRecord, {"tuple[GpuUserRecord, ...]": each(_part(GpuUserRecord))}),
    "GpuBooksRecord": _part(GpuBooksRecord),
    "HostGuardRecord": _part(HostGuardRecord),
}


def _read_memory(value: Any) -> SessionMemoryRecord:
    older = {"gpu": value["card"]} if isinstance(value, dict) and "card" in value else {}  # its name before 0.2
    found: SessionMemoryRecord = decode(SessionMemoryRecord, {**older, **value} if older else value, _OF_MEMORY)
    return found


_OWN = {
    "PlaceRecord": _part(PlaceRecord),
    "BestRecord": _part(BestRecord),
    "LossBoundsRecord": _part(LossBoundsRecord),
    "SavedRecord": _part(SavedRecord),
    "SessionMemoryRecord": _read_memory,
}


@immutable
class SessionRecord:
    """`doing`: the current part of a step. `spent_s`: the attempt's time in each part. `metrics`: what the loop
    logged last."""

    at_s: float | None = None
    process: ProcessId | None = None
    attempt: int | None = None
    phase: str | None = None
    done: float | None = None
    total: float | None = None
    unit: str | None = None
    rate_per_s: float | None = None
    eta_s: float | None = None
    ending: str | None = None
    doing: str | None = None
    spent_s: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    epoch: int | None = None
    batch: int | None = None
    place: PlaceRecord = PlaceRecord()
    best: BestRecord = BestRecord()
    loss_bounds: LossBoundsRecord = LossBoundsRecord()
    last_checkpoint: SavedRecord = SavedRecord()
    metrics: dict[str, float] = field(default_factory=dict)
    memory: SessionMemoryRecord = SessionMemoryRecord()
    stop_requested_by: str | None = None
    protections_off: tuple[str, ...] = ()
    disk_budget: int | None = left_out()

    @property
    def is_there(self) -> bool:
        return self != SessionRecord()

    @property
    def progress(self) -> ProgressRecord:
        total, eta_s = self.total, self.eta_s
        if total is None and self.unit == "steps" and (known := self._total_of_epochs()):
            total = known
            eta_s = max(0.0, known - (self.done or 0.0)) / self.rate_per_s if self.rate_per_s else None
        return ProgressRecord(self.phase, self.done, total, self.unit, self.rate_per_s, eta_s, "session")

    def _total_of_epochs(self) -> int | None:
        """All steps of all epochs, where the loop gives epochs and its loader has a length. A step may take several
        batches (gradient accumulation)."""
        place, done = self.place, self.done
        if not (done and place.epoch and place.epochs and place.num_batches and place.batch is not None):
            return None
        num_read = (place.epoch - 1) * place.num_batches + place.batch
        batches_per_step = max(1, round(num_read / done))
        return max(int(done), -(-place.epochs * place.num_batches // batches_per_step))

    @staticmethod
    def from_json(raw: object) -> SessionRecord:
        return decode(SessionRecord, raw, _OWN)

    def to_json(self) -> dict[str, Any]:
        return encode(self)


def read_session(run: RunDir, rank: int = 0) -> SessionRecord:
    return SessionRecord.from_json(atomic.read_json(run.session_file(rank)))


def write_session(run: RunDir, rank: int, record: SessionRecord) -> None:
    """Only the rank's own session calls this."""
    atomic.write_json(run.session_file(rank), record.to_json())

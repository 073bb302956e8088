"""supervisor.json: the state of the run, replaced each second by its supervisor."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId
from jackline.rundir.records.fields import decode, each, encode, left_out

_ONE_OF = {"epochs": "epoch", "steps": "step", "batches": "batch", "iterations": "iteration", "episodes": "episode"}


@immutable
class VerdictRecord:
    """PROGRESS, BUSY, WAITING, PAUSED, SUSPECT or STUCK. `next_kind` is the alarm that follows in `next_in_s` if
    nothing changes. `since_s` is only in older files, written before `for_s` existed."""

    kind: str | None = None
    label: str | None = None
    for_s: float | None = None
    text: str | None = None
    pid: int | None = None
    frame: dict[str, Any] | None = None
    next_kind: str | None = left_out()
    next_in_s: float | None = left_out()
    deadlock: tuple[dict[str, Any], ...] = left_out()
    since_s: float | None = left_out()

    @property
    def is_alarm(self) -> bool:
        return self.kind in ("SUSPECT", "STUCK")

    @property
    def is_waiting(self) -> bool:
        return self.kind == "WAITING"

    @property
    def is_pause(self) -> bool:
        return self.kind == "PAUSED"


@immutable
class NowRecord:
    """What the command is doing now, and at which line."""

    what: str | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    source: str | None = None
    worker: str | None = None  # who works while the main process waits: 'process 12 works at data.py:40'


@immutable
class HostMemoryRecord:
    """Host memory. `own_bytes` counts pages that processes share only once."""

    used_bytes: int | None = None
    limit_bytes: int | None = None
    limit_source: str | None = None
    tree_rss_bytes: int | None = None
    own_bytes: int | None = None
    peak_bytes: int | None = None
    growth_bytes_per_s: float | None = None
    seconds_to_limit: float | None = None
    grows_at: str | None = None


@immutable
class GpuRecord:
    """One GPU, as the driver reports it."""

    index: int | None = None
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    utilisation_percent: int | None = None
    memory_utilisation_percent: int | None = None
    power_w: float | None = None
    processes: tuple[dict[str, Any], ...] = ()
    power_limit_w: float | None = None
    is_ours: bool | None = left_out()
    clock_share: float | None = left_out()
    slowdown: str | None = left_out()


@immutable
class GpuUserRecord:
    """A process outside the run that uses memory of a GPU."""

    pid: int | None = None
    name: str | None = None
    used_bytes: int | None = None


@immutable
class ProgressRecord:
    """`done` of `total` `unit`s of one phase.

    `of` says what `done`, `total` and `eta_s` are about: the `run`, one `epoch` (then `epoch` of `epochs` may be
    known), or one `bar` of which it is not known whether it is the whole run. None: an older file, or the session's
    progress, which is the run's. `at_s`: when it was printed. `is_guessed`: the format was learned, or the total was
    found elsewhere than beside its counter.
    """

    phase: str | None = None
    done: float | None = None
    total: float | None = None
    unit: str | None = None
    rate_per_s: float | None = None
    eta_s: float | None = None
    source: str | None = None
    of: str | None = left_out()
    epoch: float | None = left_out()
    epochs: float | None = left_out()
    at_s: float | None = left_out()
    is_guessed: bool | None = left_out()

    @property
    def unit_word(self) -> str:
        """'steps' for what tqdm calls 'it'."""
        return "steps" if self.unit in ("it", "its") else self.unit or ""

    @property
    def one_of(self) -> str:
        """'epoch' where epochs are counted; '' for a unit that is not known."""
        return _ONE_OF.get(self.unit or "", "")

    @property
    def is_part(self) -> bool:
        """Whether `done` and `eta_s` are about one epoch or one bar, so that the end of the run is not known."""
        return self.of in ("epoch", "bar", "part")

    @property
    def is_complete(self) -> bool:
        """Whether nothing of its total is left."""
        return self.done is not None and bool(self.total) and self.done >= (self.total or 0.0)


@immutable
class PrintedNumberRecord:
    """The newest value of a metric that the command printed. `value` is None for NaN and infinity; `text` says it."""

    name: str | None = None
    value: float | None = None
    text: str | None = left_out()
    step: float | None = left_out()
    at_s: float | None = None
    is_guessed: bool | None = left_out()


@immutable
class OutputRecord:
    """How much of the command's output has been written to out.log."""

    raw_consumed_bytes: int | None = None
    raw_err_consumed_bytes: int | None = left_out()
    out_log_bytes: int | None = None
    num_lines: int | None = None
    last_line: str | None = None


@immutable
class OomCountersRecord:
    """The kernel's OOM kill counters when the attempt began."""

    cgroup_kills: int | None = None
    cgroup: str | None = None
    machine_kills: int | None = None


@immutable
class IncidentRecord:
    """A file with the stacks of every process, written at an alarm."""

    number: int | None = None
    path: str | None = None
    at_s: float | None = None
    text: str | None = None


@immutable
class CheckpointRecord:
    """The newest complete checkpoint that the command itself wrote."""

    path: str | None = None
    at_s: float | None = None


@immutable
class TimeLimitRecord:
    """When the run has to be over. `source`: 'given' (--time-limit) or the platform's name. `stops_at_s`: when the
    supervisor stops it; None where it only shows the limit. `ends_at_s`: when the platform ends everything.
    `is_told`: by the platform itself."""

    source: str | None = None
    stops_at_s: float | None = None
    ends_at_s: float | None = None
    is_told: bool | None = None


def _part(record: Any) -> Any:
    return lambda value: decode(record, value)


_OWN = {
    "VerdictRecord": _part(VerdictRecord),
    "NowRecord": _part(NowRecord),
    "HostMemoryRecord": _part(HostMemoryRecord),
    "ProgressRecord": _part(ProgressRecord),
    "OutputRecord": _part(OutputRecord),
    "OomCountersRecord": _part(OomCountersRecord),
    "CheckpointRecord": _part(CheckpointRecord),
    "TimeLimitRecord": _part(TimeLimitRecord),
    "tuple[GpuRecord, ...]": each(_part(GpuRecord)),
    "tuple[GpuUserRecord, ...]": each(_part(GpuUserRecord)),
    "tuple[IncidentRecord, ...]": each(_part(IncidentRecord)),
    "tuple[PrintedNumberRecord, ...]": each(_part(PrintedNumberRecord)),
}


@immutable
class SupervisorRecord:
    """`options` are SuperviseOptions as JSON. A part that is unknown has only empty fields."""

    at_s: float | None = None
    supervisor: ProcessId | None = None
    is_finished: bool = False
    is_restarting: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    checkpoint: CheckpointRecord = CheckpointRecord()
    gpu_others: tuple[GpuUserRecord, ...] = ()
    attempt: int | None = None
    child: ProcessId | None = None
    keeper: ProcessId | None = None
    started_at_s: float | None = None
    silent_s: float | None = None
    verdict: VerdictRecord = VerdictRecord()
    now: NowRecord = NowRecord()
    cpu_cores: float | None = None
    disk_bytes_per_s: float | None = None
    net_bytes_per_s: float | None = None
    num_processes: int | None = None
    memory: HostMemoryRecord = HostMemoryRecord()
    gpu: tuple[GpuRecord, ...] = ()
    progress: ProgressRecord = ProgressRecord()
    printed: tuple[PrintedNumberRecord, ...] = ()
    output: OutputRecord = OutputRecord()
    oom_before: OomCountersRecord = OomCountersRecord()
    resumed_from: str | None = None
    incidents: tuple[IncidentRecord, ...] = ()
    ranks: tuple[dict[str, Any], ...] = ()  # each a RankRecord (records/ranks.py)
    protections_off: tuple[str, ...] = ()
    restart_at_s: float | None = left_out()
    time_limit: TimeLimitRecord = TimeLimitRecord()
    evidence: dict[str, Any] | None = left_out()

    @property
    def is_there(self) -> bool:
        """False for a file that is absent or could not be read at all."""
        return self != SupervisorRecord()

    @staticmethod
    def from_json(raw: object) -> SupervisorRecord:
        return decode(SupervisorRecord, raw, _OWN)

    def to_json(self) -> dict[str, Any]:
        return encode(self)


def read_supervisor(run: RunDir) -> SupervisorRecord:
    return SupervisorRecord.from_json(atomic.read_json(run.supervisor_file))


def write_supervisor(run: RunDir, record: SupervisorRecord, *, durable: bool = False) -> None:
    """Only the run's supervisor calls this."""
    atomic.write_often(run.supervisor_file, record.to_json(), durable=durable)

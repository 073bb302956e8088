"""A plan as text and as JSON. Text for people has one idea a line and names the units.

Owns the wording of plans and tables of plans. `oom_report` owns the report after an out-of-memory error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jackline.memory.plan.choose import MOST_MICRO_BATCH, Plan, Room, Saving, largest_that, room_of
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.pace import Until, time_json, time_lines
from jackline.memory.plan.scale import Line, line_through
from jackline.memory.predict.allocator import ArenaFull
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import replay, trace_step
from jackline.memory.predict.trace import Trace
from jackline.units import format_bytes

_PART_WORDS = {
    "weights": "weights",
    "weight_copies": "low-precision copy of the weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations kept for backward",
    "logits": "logits and loss",
    "temporaries": "temporaries",
    "workspace": "cuBLAS workspace",
    "communication": "communication between GPUs",
    "measured": "measured as a whole",
    "fragmentation": "reserved but unused (fragmentation)",
    "context": "CUDA context and driver",
}
_PRECISION_WORDS = {
    "fp32": "float32",
    "bf16": "bf16 autocast",
    "fp16": "fp16 autocast with a scaler",
    "bf16-weights": "bf16 weights with a float32 master",
    "bf16-pure": "bf16 weights, gradients and optimizer state",
}
_NUM_FIXES = 3
_WORTH_A_LINE = 2**20


def plan_text(
    made: Plan, shown: Mapping[str, object], *, is_explaining: bool = False, until: Until | None = None
) -> str:
    """The choice and whether it fits; with `is_explaining` also where the bytes go and what would save some."""
    gpu = made.gpu.name if made.gpu.count == 1 else f"{made.gpu.count} x {made.gpu.name}"
    lines = [f"{made.job} on {gpu}: {_verdict(made)}", *_choice(made, shown), _peaks(made), *_between_steps(made)]
    lines += time_lines(made, until or Until())
    lines += [f"note: {note}" for note in made.notes]
    if is_explaining:
        lines += ["", *_parts(made), "", *_savings(_useful(made))]
    elif made.fit != "fits":
        lines += [*_savings(_useful(made)[:_NUM_FIXES])]
    return "\n".join(lines)


def _verdict(made: Plan) -> str:
    if made.fit == "fits":
        return "fits"
    if made.fit == "tight":
        return "tight: it fits only with nothing to spare"
    return "does not fit, not even one sample at a time"


def _choice(made: Plan, shown: Mapping[str, object]) -> Iterator[str]:
    times = "once" if made.accumulation == 1 else f"{made.accumulation} times"
    ranks = f"{made.gpu.count} GPUs x " if made.samples_a_step != made.global_batch else ""
    most = f"up to {made.max_micro_batch:,} would fit" if made.max_micro_batch else "not even 1 would fit"
    if made.max_micro_batch >= MOST_MICRO_BATCH:
        most = f"{MOST_MICRO_BATCH:,} or more would fit"
    yield f"  batch {made.samples_a_step} = {ranks}micro-batch {made.micro_batch}, accumulated {times} ({most})"
    yield f"  precision {'of your code' if made.is_own_step else _PRECISION_WORDS[made.options.precision]}"
    settings = ", ".join(f"{key}={value}" for key, value in shown.items())
    if settings:
        yield f"  {settings}"


def _peaks(made: Plan) -> str:
    allocated, reserved = made.prediction.peak_allocated_bytes, made.prediction.peak_reserved_bytes
    return (
        f"  peak {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved,"
        f" {format_bytes(made.device_bytes)} of {format_bytes(made.gpu.usable_bytes)} in nvidia-smi"
    )


def _between_steps(made: Plan) -> Iterator[str]:
    """What an evaluation and a save need. A save copies on the GPU only where three copies of the state would fit."""
    if made.evaluation_bytes:
        more = made.evaluation_bytes > made.prediction.peak_allocated_bytes
        than = ", more than a step" if more else ""
        if made.evaluation_bytes > made.room.limit_bytes and made.fit != "no":
            than = ", more than there is: evaluate fewer samples at a time"
        yield f"  evaluation: {format_bytes(made.evaluation_bytes)} allocated at the same micro-batch{than}"
    if made.state_bytes:
        whose = " of each rank" if made.options.num_ranks > 1 and made.options.parallel == "fsdp" else ""
        size = format_bytes(made.state_bytes)
        yield f"  saving: {size}{whose} on disk and as much host memory; on the GPU nothing that a step would miss"


def _parts(made: Plan) -> Iterator[str]:
    yield f"where it goes at the peak, in {_phase(made.prediction.peak_phase)}:"
    parts = made.parts()
    total = max(1, made.device_bytes)
    for part, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= _WORTH_A_LINE:
            yield f"  {format_bytes(size):>10}  {100 * size / total:4.0f} %  {_PART_WORDS.get(part, part)}"
    free = made.gpu.usable_bytes - made.device_bytes
    yield (
        f"  {format_bytes(free):>10}          free" if free >= 0 else f"  {format_bytes(-free):>10}          too much"
    )


def _phase(phase: str) -> str:
    return {"forward": "the forward pass", "backward": "the backward pass", "optimizer": "the update"}.get(
        phase, phase
    )


def _useful(made: Plan) -> tuple[Saving, ...]:
    return tuple(saving for saving in made.savings if saving.saved_bytes > 0)


def _savings(savings: tuple[Saving, ...]) -> Iterator[str]:
    if not savings:
        yield "nothing Jackline knows would save more"
        return
    yield "what would save memory, cheapest first:"
    for saving in savings:
        fitting = (
            f"micro-batch {saving.max_micro_batch} would fit" if saving.max_micro_batch else "still does not fit"
        )
        yield f"  {format_bytes(saving.saved_bytes):>10}  {saving.name} (price: {saving.price}; {fitting})"


def plan_json(made: Plan, shown: Mapping[str, object], until: Until | None = None) -> dict[str, Any]:
    peak = made.prediction
    return {
        "job": made.job,
        "gpu": made.gpu.name,
        "card_bytes": made.gpu.usable_bytes,
        "fit": made.fit,
        "global_batch": made.global_batch,
        "micro_batch": made.micro_batch,
        "accumulation": made.accumulation,
        "max_micro_batch": made.max_micro_batch,
        "precision": made.options.precision,
        "peak_allocated_bytes": peak.peak_allocated_bytes,
        "peak_reserved_bytes": peak.peak_reserved_bytes,
        "device_bytes": made.device_bytes,
        "peak_phase": peak.peak_phase,
        "evaluation_bytes": made.evaluation_bytes,
        "state_bytes": made.state_bytes,
        "parts": made.parts(),
        "savings": [asdict(saving) for saving in made.savings],
        "settings": dict(shown),
        "time": time_json(made, until or Until()),
        "num_gpus": made.gpu.count,
        "notes": list(made.notes),
    }


def table_text(cells: Mapping[tuple[str, int, str], str], gpus: list[GpuModel]) -> str:
    """Rows are size and batch, columns are GPUs. `cells` maps (size, batch, GPU) to the word in its cell."""
    rows = list(dict.fromkeys((size, batch) for size, batch, _ in cells))
    width = max(8, *(len(gpu.name) for gpu in gpus), *(len(cell) for cell in cells.values()))
    head = f"{'size':<10} {'batch':>5}  " + "  ".join(f"{gpu.name:>{width}}" for gpu in gpus)
    lines = [head]
    for size, batch in rows:
        words = "  ".join(f"{cells[size, batch, gpu.name]:>{width}}" for gpu in gpus)
        lines.append(f"{size:<10} {batch:>5}  {words}")
    lines.append(
        "fits: the whole batch at once; at N: in micro-batches of N; tight: nothing to spare; no: not at all"
    )
    return "\n".join(lines)


_THROUGH = (2, 4)
# Without accumulation no gradients exist during the forward pass: a whole batch this many times larger may still fit.
_WHOLE_MAY_FIT = 2.0
_SLACK = 64 * 2**20  # three of the allocator's segments
_ANOTHER_KIND = 1.15


@dataclass(frozen=True)
class _Kind:
    """GPUs that allocate alike."""

    options: StepOptions
    has_flash: bool
    has_cudnn: bool


def _same_size(options: StepOptions) -> StepOptions:
    return replace(options, precision="bf16") if options.precision == "fp16" else options


class Fits:
    """Answers for one job on any GPU. Traces are made once for all GPUs that allocate alike."""

    def __init__(self, job: Job, on_trace: Callable[[int], None] | None = None) -> None:
        self._job, self._on_trace = job, on_trace
        self._lines: dict[tuple[_Kind, bool], Line | None] = {}
        self._traces: dict[tuple[tuple[_Kind, bool], int], Trace] = {}
        self._known: dict[int, tuple[int, int]] = {}  # peaks by the identity of a trace above

    def cell(self, gpu: GpuModel, batch: int) -> str:
        room, options = room_of(gpu), self._options(gpu)
        budget = room.budget_bytes
        if self._surely_fits(gpu, options, batch, budget):
            return "fits"
        # With gradients kept from another slice a step needs more, so where that fits, a whole batch fits too.
        if self._holds(gpu, options, batch, budget, is_accumulating=True):
            return "fits"
        smaller = self._largest(gpu, options, batch, room)
        may_fit = batch <= max(1, smaller) * _WHOLE_MAY_FIT
        if may_fit and self._holds(gpu, options, batch, budget, is_accumulating=False):
            return "fits"
        if smaller:
            return f"at {smaller}"
        is_tight = self._holds(gpu, options, 1, room.limit_bytes, is_accumulating=batch > 1)
        return "tight" if is_tight else "no"

    def _surely_fits(self, gpu: GpuModel, options: StepOptions, batch: int, budget: int) -> bool:
        """By what GPUs of another kind need that were traced already: kernels of attention differ, by far less than
        the share that is added here."""
        for (kind, is_accumulating), line in self._lines.items():
            is_alike = _same_size(kind.options) == _same_size(options)
            if line is None or not is_accumulating or not is_alike or kind == self._kind(gpu, options):
                continue
            trace = self._at(line, (kind, True), batch)
            if self._peaks(trace, options)[1] * _ANOTHER_KIND + trace.most_moved_bytes(gpu) + _SLACK <= budget:
                return True
        return False

    def _kind(self, gpu: GpuModel, options: StepOptions) -> _Kind:
        return _Kind(options, gpu.has_flash_attention, gpu.has_cudnn_attention)

    def _options(self, gpu: GpuModel) -> StepOptions:
        asked = self._job.options
        is_automatic = asked.precision in ("bf16", "fp16")
        return replace(asked, precision=gpu.precision) if is_automatic else asked

    def _largest(self, gpu: GpuModel, options: StepOptions, batch: int, room: Room) -> int:
        budget = room.budget_bytes
        return largest_that(lambda n: self._holds(gpu, options, n, budget, is_accumulating=True), batch - 1)

    def _holds(self, gpu: GpuModel, options: StepOptions, batch: int, cap: int, *, is_accumulating: bool) -> bool:
        """Most answers follow from the peaks on another GPU that allocates alike: those of this one differ by the
        scratch memory of a few kernels. Only near the cap the trace is replayed for this very GPU."""
        trace = self._trace(gpu, options, batch, is_accumulating)
        allocated, reserved = self._peaks(trace, options)
        slack = trace.most_moved_bytes(gpu) + _SLACK
        if reserved + slack <= cap:
            return True
        if allocated - slack > cap:
            return False
        try:
            replay(trace.on(gpu), batch, is_expandable=options.is_expandable, cap_bytes=cap)
        except ArenaFull:
            return False
        return True

    def _peaks(self, trace: Trace, options: StepOptions) -> tuple[int, int]:
        if id(trace) not in self._known:
            found = replay(trace, 0, is_expandable=options.is_expandable)
            self._known[id(trace)] = found.peak_allocated_bytes, found.peak_reserved_bytes
        return self._known[id(trace)]

    def _trace(self, gpu: GpuModel, options: StepOptions, batch: int, is_accumulating: bool) -> Trace:
        key = (self._kind(gpu, options), is_accumulating)
        if is_accumulating and key not in self._lines:
            self._lines[key] = line_through(lambda n: self._traced(gpu, options, n, True), *_THROUGH)
        line = self._lines.get(key)  # of a whole batch there is none: one or two of them are asked for
        if line is not None:
            return self._at(line, key, batch)
        if (key, batch) not in self._traces:
            self._traces[key, batch] = self._traced(gpu, options, batch, is_accumulating)
        return self._traces[key, batch]

    def _at(self, line: Line, key: tuple[_Kind, bool], batch: int) -> Trace:
        if (key, batch) not in self._traces:
            self._traces[key, batch] = line.at(batch)
        return self._traces[key, batch]

    def _traced(self, gpu: GpuModel, options: StepOptions, batch: int, is_accumulating: bool) -> Trace:
        if self._on_trace is not None:
            self._on_trace(batch)
        return trace_step(self._job, batch, gpu, options, is_accumulating=is_accumulating)


def fit_table(
    jobs: dict[str, Job],
    batches: Iterable[int],
    gpus: list[GpuModel],
    on_trace: Callable[[int], None] | None = None,
) -> dict[tuple[str, int, str], str]:
    """(size, batch, GPU) -> 'fits', 'at N', 'tight' or 'no'."""
    cells = {}
    for size, job in jobs.items():
        fits = Fits(job, on_trace)
        for batch in batches:
            for gpu in gpus:
                cells[size, batch, gpu.name] = fits.cell(gpu, batch)
    return cells

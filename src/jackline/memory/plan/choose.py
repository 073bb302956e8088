"""The plan for one job on one GPU: the micro-batch, the number of accumulation steps, and whether it fits.

Owns the search and the order of savings. `predict` owns the predictions. A plan never changes what was asked for: the
global batch, the precision and all else stay, and options that would save memory are listed with their cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.scale import Line, line_through
from jackline.memory.predict.allocator import ArenaFull
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import CannotTrace, Prediction, chosen_range, evaluation_bytes, replay, trace_step
from jackline.memory.predict.trace import Trace
from jackline.memory.predict.work import StepTime, estimate
from jackline.memory.ranks.shards import HOST_MEMORY, PCIE, host_notes, rank_notes
from jackline.units import format_bytes

Fit = Literal["fits", "tight", "no"]

# Share of the allocator's budget that stays free for what no trace can know (kernels' own memory, other processes).
MARGIN_BEFORE_REHEARSAL = 0.04
MARGIN_AFTER_REHEARSAL = 0.015
# On a small budget a share is less than the pages that a second stream or a copied batch takes.
_LEAST_SPARE_BYTES = 40 * 2**20
CHUNK_ROWS = 2048
MAX_ACCUMULATION = 4  # a model size whose batch needs more slices than this counts as too large for the GPU
_LINE_THROUGH = (2, 4)
MOST_MICRO_BATCH = 2**16
# Without accumulation no gradients exist during the forward pass: a whole batch this many times larger may still fit.
_WHOLE_MAY_FIT = 1.4


@dataclass(frozen=True)
class Room:
    """The GPU memory that PyTorch's allocator may use. `correction` is measured / predicted, from a rehearsal."""

    gpu_bytes: int
    margin: float = MARGIN_BEFORE_REHEARSAL
    correction: float = 1.0

    @property
    def budget_bytes(self) -> int:
        spare = max(self.gpu_bytes * self.margin, _LEAST_SPARE_BYTES) if self.margin else 0
        return max(0, int((self.gpu_bytes - spare) / self.correction))

    @property
    def limit_bytes(self) -> int:
        return int(self.gpu_bytes / self.correction)


@dataclass(frozen=True)
class Saving:
    """One option that would need less memory. `saved_bytes` is reserved memory at the plan's micro-batch, from a new
    trace with the option."""

    name: str
    price: str
    saved_bytes: int
    max_micro_batch: int  # the largest that would about fit with this option; 0 when none does
    options: StepOptions


@dataclass(frozen=True)
class Plan:
    job: str
    gpu: GpuModel
    options: StepOptions
    global_batch: int
    micro_batch: int
    accumulation: int
    max_micro_batch: int  # the largest that fits, also beyond the batch; 0 when none does
    fit: Fit
    prediction: Prediction
    room: Room
    savings: tuple[Saving, ...] = ()
    notes: tuple[str, ...] = ()
    time: StepTime | None = None
    state_bytes: int = 0  # weights, buffers and optimizer state: what a checkpoint holds; 0: unknown
    evaluation_bytes: int = 0  # allocated while a batch is evaluated; 0: unknown
    is_own_step: bool = False  # whose precision is that of its code

    @property
    def samples_a_step(self) -> int:
        """Of all ranks together."""
        return self.global_batch * (1 if self.options.parallel == "tp" else self.gpu.count)

    @property
    def device_bytes(self) -> int:
        """What nvidia-smi will show."""
        return self.prediction.peak_reserved_bytes + self.gpu.context_bytes

    def parts(self) -> dict[str, int]:
        """Where every byte of `device_bytes` goes."""
        made: dict[str, int] = {str(part): size for part, size in self.prediction.parts.items() if size}
        made["fragmentation"] = self.prediction.peak_reserved_bytes - self.prediction.peak_allocated_bytes
        made["context"] = self.gpu.context_bytes
        return made


def room_of(gpu: GpuModel, *, free_bytes: int | None = None) -> Room:
    """The whole GPU except the driver's context; or what is actually free now, when that is known."""
    usable = gpu.usable_bytes if free_bytes is None else min(free_bytes, gpu.usable_bytes)
    return Room(max(0, usable - gpu.context_bytes))


def split_batch(global_batch: int, max_micro_batch: int) -> tuple[int, int]:
    """(micro-batch, accumulation): as few slices as possible, then as even as possible. A batch of 32 with at most 13
    at a time gives (11, 3): slices of 11, 11 and 10. The loss is divided by the count of the whole step, so the
    result is exact although the last slice is smaller."""
    largest = max(1, min(global_batch, max_micro_batch))
    accumulation = -(-global_batch // largest)
    return -(-global_batch // accumulation), accumulation


def largest_that(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest number for which `fits` holds; 0 when it does not hold for 1. `fits` must be true up to some number
    and false above it."""
    if at_most < 1 or not fits(1):
        return 0
    low, high = 1, 2
    while high <= at_most and fits(high):
        low, high = high, high * 2
    high = min(high, at_most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plan(job: Job, gpu: GpuModel, *, room: Room | None = None, on_trace: Callable[[int], None] | None = None) -> Plan:
    """Trace, search, then trace the chosen micro-batch itself: 3 or 4 traces. `on_trace` is called before each with
    its micro-batch."""
    room = room or room_of(gpu)
    if gpu.count > 1:
        job = for_a_rank(job, gpu.count)
    ladder = _Ladder(job, gpu, job.options, on_trace)
    largest = ladder.largest(room.budget_bytes)
    micro_batch, accumulation = split_batch(job.global_batch, largest)
    prediction, fit = ladder.verdict(micro_batch, accumulation, room)
    while fit == "no" and micro_batch > 1 and largest > 0:
        # The straight line predicted a fit, the trace contradicts it: go down one at a time, it is never far.
        largest = micro_batch - 1
        micro_batch, accumulation = split_batch(job.global_batch, largest)
        prediction, fit = ladder.verdict(micro_batch, accumulation, room)
    return Plan(
        job=job.name,
        gpu=gpu,
        options=job.options,
        global_batch=job.global_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        max_micro_batch=ladder.largest_beyond(room.budget_bytes, largest),
        fit=fit,
        prediction=prediction,
        room=room,
        notes=(
            *_notes(job, gpu, prediction, ladder.wire_bytes(micro_batch, accumulation)),
            *ladder.host_notes(micro_batch, accumulation),
            *ladder.ranges(micro_batch, accumulation),
        ),
        time=ladder.time(micro_batch, accumulation),
        state_bytes=ladder.trace(micro_batch, accumulation > 1).state_bytes,
        is_own_step=job.own_step is not None,
    )


def for_a_rank(job: Job, num_ranks: int) -> Job:
    """Each rank takes its part of the batch; with tensor parallelism all ranks take the whole."""
    batch = job.global_batch if job.options.parallel == "tp" else -(-job.global_batch // num_ranks)
    return replace(job, global_batch=batch, options=replace(job.options, num_ranks=num_ranks))


def add_savings(job: Job, made: Plan) -> Plan:
    """The plan with the options that would need less memory; each takes two traces."""
    if made.gpu.count > 1:
        job = for_a_rank(job, made.gpu.count)
    return replace(made, savings=tuple(_savings(job, made)))


def add_evaluation(job: Job, made: Plan) -> Plan:
    """The plan with the peak of an evaluation at the same micro-batch: one trace of a forward pass."""
    if made.gpu.count > 1:
        job = for_a_rank(job, made.gpu.count)
    try:
        found = evaluation_bytes(job, made.micro_batch, made.gpu, job.options, made.state_bytes)
    except CannotTrace as error:  # the step was traced, so the plan stands
        return replace(made, notes=(*made.notes, f"an evaluation cannot {error.message.partition(' cannot ')[2]}"))
    return replace(made, evaluation_bytes=found or 0)


def _notes(job: Job, gpu: GpuModel, prediction: Prediction, wire_bytes: int = 0) -> Iterator[str]:
    if job.note:
        yield job.note
    if gpu.is_assumed:
        yield f"{gpu.name} is not in the table: taken as a GPU with bf16 and flash attention"
    for assumed in prediction.assumptions:
        yield f"assumed: {assumed}"
    if gpu.is_amd:
        yield f"{gpu.name}: kernels are assumed to need what NVIDIA's need, so this is an estimate"
    if job.options.num_ranks > 1:
        yield from rank_notes(job, wire_bytes)
    unknowns = [name for name in prediction.unknowns if not name.startswith("aten::convolution")]
    if unknowns:
        names = ", ".join(unknowns[:3])
        yield f"{names} may need memory that cannot be foretold: an estimate, the rehearsal decides"


def judged(trace: Trace, micro_batch: int, room: Room, *, is_expandable: bool) -> tuple[Prediction, Fit]:
    """Whether a step fits into a room: with the margin, only without it, or not at all."""
    caps: tuple[tuple[int, Fit], ...] = ((room.budget_bytes, "fits"), (room.limit_bytes, "tight"))
    for cap, fit in caps:
        try:
            return replay(trace, micro_batch, is_expandable=is_expandable, cap_bytes=cap), fit
        except ArenaFull:
            continue
    return replay(trace, micro_batch, is_expandable=is_expandable), "no"


def _allocated(trace: Trace) -> int:
    return replay(trace, 0, is_expandable=True).peak_allocated_bytes


class _Ladder:
    """The predictions of one job under one set of options, at any micro-batch, with as few traces as possible."""

    def __init__(
        self, job: Job, gpu: GpuModel, options: StepOptions, on_trace: Callable[[int], None] | None = None
    ) -> None:
        self._job, self._gpu_model, self._options = job, gpu, options
        self._on_trace = on_trace
        self._traces: dict[tuple[int, bool], Trace] = {}
        self._line: Line | None = None
        self._asked: set[int] = set()  # micro-batches of the line

    def trace(self, micro_batch: int, is_accumulating: bool) -> Trace:
        key = (micro_batch, is_accumulating)
        if key not in self._traces:
            if self._on_trace is not None:
                self._on_trace(micro_batch)
            self._traces[key] = trace_step(
                self._job, micro_batch, self._gpu_model, self._options, is_accumulating=is_accumulating
            )
        return self._traces[key]

    def largest(self, budget_bytes: int) -> int:
        """The largest micro-batch that fits, at most the whole batch. Only the whole batch needs no accumulation."""
        whole = self._job.global_batch
        found = largest_that(lambda n: self._fits(self._at(n), budget_bytes), whole)
        if found < whole <= found * _WHOLE_MAY_FIT and self._fits(self.trace(whole, False), budget_bytes):
            return whole
        return found

    def largest_beyond(self, budget_bytes: int, largest: int) -> int:
        """The largest micro-batch that would fit if the batch were larger; `largest` fits within the batch."""
        if largest < self._job.global_batch:
            return largest
        self._make_line()
        line = self._line
        if line is None:
            return max(largest, self._beyond_by_peaks(budget_bytes, largest))
        return max(largest, largest_that(lambda n: self._fits(line.at(n), budget_bytes), MOST_MICRO_BATCH))

    def _beyond_by_peaks(self, budget_bytes: int, largest: int) -> int:
        """Without a line (the model's code takes other paths at other sizes): by the peaks of the largest and of half
        of it, with a tenth to spare, because no trace of that size proves it."""
        few = max(1, largest // 2)
        if few == largest:
            return largest
        is_accumulating = self._job.global_batch > 1
        high, low = (self.reserved_bytes(count, is_accumulating) for count in (largest, few))
        a_sample = max(1, high - low) / (largest - few)
        return min(MOST_MICRO_BATCH, largest + int(max(0, 0.9 * budget_bytes - high) / a_sample))

    def _make_line(self) -> None:
        if not self._asked:  # at most once, also where there is no line
            self._line = line_through(self._trace_again, *_LINE_THROUGH)

    def _trace_again(self, micro_batch: int) -> Trace:
        """Anew if it is asked for twice: see `line_through`."""
        if micro_batch in self._asked:
            self._traces.pop((micro_batch, True), None)
        self._asked.add(micro_batch)
        return self.trace(micro_batch, True)

    def _at(self, micro_batch: int) -> Trace:
        _, second = _LINE_THROUGH
        if self._job.global_batch <= second:
            try:
                return self.trace(micro_batch, self._job.global_batch > 1)
            except CannotTrace:
                # Batch norm refuses a single sample; more of them go.
                if micro_batch > 1 or self._job.global_batch == 1:
                    raise
        self._make_line()
        return self._line.at(micro_batch) if self._line is not None else self.trace(micro_batch, True)

    def _fits(self, trace: Trace, cap_bytes: int) -> bool:
        try:
            replay(trace, 0, is_expandable=self._options.is_expandable, cap_bytes=cap_bytes)
        except ArenaFull:
            return False
        return True

    def verdict(self, micro_batch: int, accumulation: int, room: Room) -> tuple[Prediction, Fit]:
        """The prediction from a trace of the chosen micro-batch itself. The replay runs under the memory cap, because
        an allocator that reaches its cap first releases what it does not use."""
        trace = self.trace(micro_batch, accumulation > 1)
        return judged(trace, micro_batch, room, is_expandable=self._options.is_expandable)

    def wire_bytes(self, micro_batch: int, accumulation: int) -> int:
        """DDP adds up gradients once a step, the others send in every slice."""
        slices = 1 if self._options.parallel == "ddp" else accumulation
        return self.trace(micro_batch, accumulation > 1).wire_bytes * slices

    def host_notes(self, micro_batch: int, accumulation: int) -> Iterator[str]:
        trace = self.trace(micro_batch, accumulation > 1)
        if trace.host_bytes:
            yield from host_notes(trace, self._options.num_ranks, accumulation)

    def ranges(self, micro_batch: int, accumulation: int) -> Iterator[str]:
        """How far off the peak may be where a library or the data decides: one sentence for each cause."""
        trace = self.trace(micro_batch, accumulation > 1)
        if (chosen := chosen_range(trace)) is not None:
            low, high = chosen
            least, most = chosen_range(trace, is_reserved=True) or chosen
            yield (
                f"cuDNN chooses how its convolutions work: {format_bytes(low)} to {format_bytes(high)} allocated,"
                f" {format_bytes(least)} to {format_bytes(most)} reserved, the rehearsal decides"
            )
        if trace.is_routed:
            options = replace(self._options, routing="one-sided")
            other = trace_step(self._job, micro_batch, self._gpu_model, options, is_accumulating=accumulation > 1)
            yield (
                f"if all tokens chose the same experts: {format_bytes(_allocated(other))} allocated"
                f" instead of {format_bytes(_allocated(trace))}"
            )

    def time(self, micro_batch: int, accumulation: int) -> StepTime:
        trace = self.trace(micro_batch, accumulation > 1)
        found = estimate(trace, self._gpu_model, accumulation)
        if not self._options.is_offloading:
            return found
        more_s = trace.moved_bytes * accumulation / PCIE + trace.update_bytes / HOST_MEMORY
        return replace(found, seconds=found.seconds + more_s, bound="the host")

    def reserved_bytes(self, micro_batch: int, is_accumulating: bool) -> int:
        trace = self.trace(micro_batch, is_accumulating)
        return replay(trace, micro_batch, is_expandable=self._options.is_expandable).peak_reserved_bytes

    def about_largest(self, budget_bytes: int, micro_batch: int) -> int:
        """Like `largest`, but estimated by a straight line through the peaks at `micro_batch` and half of it: two
        traces."""
        is_accumulating = self._job.global_batch > 1
        many, few = max(2, micro_batch), max(1, micro_batch // 2)
        if few == 1 and self.reserved_bytes(1, is_accumulating) > budget_bytes:
            return 0
        high, low = self.reserved_bytes(many, is_accumulating), self.reserved_bytes(few, is_accumulating)
        a_sample = (high - low) / (many - few)
        if a_sample <= 0:
            return self._job.global_batch if high <= budget_bytes else 0
        return max(0, min(self._job.global_batch, many + int((budget_bytes - high) // a_sample)))


def _cheaper(job: Job) -> Iterator[tuple[str, str, StepOptions]]:
    """The options that could be changed, cheapest first: (name, cost, options with the change)."""
    now = job.options
    if now.optimizer != "fused":
        yield "fused AdamW", "none", replace(now, optimizer="fused")
    if not now.is_expandable:
        yield "expandable segments", "none", replace(now, is_expandable=True)
    if job.can_chunk_loss and not now.loss_chunk_rows:
        yield "loss in chunks", "2 to 4 % of the time", replace(now, loss_chunk_rows=CHUNK_ROWS)
    if now.precision == "fp32":
        yield "bf16 autocast", "less precise products", replace(now, precision="bf16")
    if now.precision == "bf16":
        yield "bf16 weights with float32 master", "less precise sums", replace(now, precision="bf16-weights")
    if job.can_recompute and not now.is_recomputing:
        yield "recompute activations", "about a third more time", replace(now, is_recomputing=True)


def _savings(job: Job, made: Plan) -> Iterator[Saving]:
    ladder, is_accumulating = _Ladder(job, made.gpu, job.options), made.accumulation > 1
    # Of a plan that does not fit this was traced already; one that fits was replayed under the GPU's cap.
    before = made.prediction.peak_reserved_bytes
    if made.fit != "no":
        before = ladder.reserved_bytes(made.micro_batch, is_accumulating)
    if made.micro_batch > 1:
        half = -(-made.micro_batch // 2)
        saved = before - ladder.reserved_bytes(half, True)
        name = f"micro-batch {half}, accumulated {-(-job.global_batch // half)} times"
        yield Saving(name, "a little speed", saved, made.max_micro_batch, job.options)
    for name, price, options in _cheaper(job):
        other = _Ladder(job, made.gpu, options)
        saved = before - other.reserved_bytes(made.micro_batch, is_accumulating)
        yield Saving(name, price, saved, other.about_largest(made.room.budget_bytes, made.micro_batch), options)

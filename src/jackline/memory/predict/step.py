"""The memory of a training step without a GPU: the step runs on the meta device and its allocations are replayed.

Owns the order of a step (slices, backward, optimizer) as the trainer does it, the labels of what is allocated, and
what several GPUs change. DDP keeps every gradient a second time, in buckets. FSDP2 keeps a share of weights,
gradients and optimizer state, and gathers one block at a time, with the next one on its way: an estimate, no rank is
imitated. A prediction takes 0.5 to 1.5 s of CPU for a model of 125M. Questions about values (`.item()`, `nonzero`)
are answered by `values`. Code that needs a real device cannot be traced: CannotTrace says where, and a rehearsal
decides instead.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jackline.errors import JacklineError
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.predict.allocator import Arena
from jackline.memory.predict.cuda_rules import CudaRules, leaf_functions
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.optimizers import MetaOptimizer
from jackline.memory.predict.own_step import trace_own_step
from jackline.memory.predict.questions import Questions
from jackline.memory.predict.shortcuts import Unfilled
from jackline.memory.predict.trace import Part, Recorder, Trace
from jackline.memory.predict.values import Values, keep_value, own_chance

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_STEPS = 2  # the optimizer's state exists only from the second step on


class CannotTrace(JacklineError):
    """The model's own code needs something that the meta device does not have."""


@dataclass(frozen=True)
class Prediction:
    """The GPU memory one process will take. `parts` breaks `peak_allocated_bytes` down at the peak."""

    micro_batch: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    parts: dict[Part, int]
    peak_phase: str
    unknowns: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()  # what was assumed where a shape or a branch depends on real data


def trace_step(
    job: Job, micro_batch: int, gpu: GpuModel, options: StepOptions, *, is_accumulating: bool = True
) -> Trace:
    """Trace two training steps. When gradients are accumulated, those of the first step stay for the second, because
    every slice of a step but the first one finds gradients. Two slices a step would take twice the time to trace."""
    with _explained(job.name), own_chance(), _no_collections():
        if job.own_step is not None:
            return trace_own_step(job.own_step, micro_batch, gpu)
        return _trace(job, micro_batch, gpu, options, is_accumulating)


def _trace(job: Job, micro_batch: int, gpu: GpuModel, options: StepOptions, is_accumulating: bool) -> Trace:
    values = Values(options.routing)
    recorder = Recorder(processors=gpu.processors, workspace_bytes=gpu.workspace_bytes, values=values)
    rules = CudaRules(
        _LOW.get(options.precision),
        has_flash=gpu.has_flash_attention,
        has_cudnn=gpu.has_cudnn_attention,
        on_weight_copy=lambda copy: recorder.add(copy, "weight_copies"),
        on_work=recorder.counter.add,
    )
    model = _build(job, options, values).train()
    for tensor in _weights(model):
        recorder.add(tensor, "weights")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if options.num_ranks > 1 and options.parallel == "ddp":
        add_buckets(recorder, trained)
    has_kept = False
    with torch.device("meta"), leaf_functions(), rules.answers(), recorder, rules, Questions(values):
        optimizer = MetaOptimizer(trained, options)
        for step in range(_NUM_STEPS):
            gc.collect(0)
            recorder.counter.is_on = step == 0
            _slice(recorder, rules, job, model, micro_batch)
            recorder.counter.is_on = False
            _label_gradients(recorder, trained)
            if step and is_accumulating and not has_kept:
                _slice(recorder, rules, job, model, micro_batch)
            recorder.phase = "optimizer"
            optimizer.step()
            for tensor in optimizer.state_tensors():
                recorder.add(tensor, "optimizer")
            # An update that widens the gradients to float32 has dropped them already.
            has_kept = is_accumulating and any(weight.grad is not None for weight in trained)
            if not has_kept:
                for weight in trained:
                    weight.grad = None
        for weight in trained:
            weight.grad = None  # the next trace may use the same model
        state_bytes = sum(tensor.nbytes for tensor in optimizer.state_tensors())
        trained_bytes = sum(weight.nbytes for weight in trained)
        kept_bytes = state_bytes + sum(tensor.nbytes for tensor in _weights(model))
    # Gradients and weights are read, weights written; the state is read and written.
    update_bytes = 3 * trained_bytes + 2 * state_bytes
    made = replace(recorder.finish(rules.class_sizes), update_bytes=update_bytes, state_bytes=kept_bytes)
    return _on_ranks(made, model, options)


def _build(job: Job, options: StepOptions, values: Values) -> nn.Module:
    with torch.device("meta"), Unfilled(values), Questions(values):
        model = job.build(options)
        return model.to(torch.bfloat16) if options.precision in ("bf16-weights", "bf16-pure") else model


def evaluation_bytes(job: Job, micro_batch: int, gpu: GpuModel, options: StepOptions, state_bytes: int) -> int | None:
    """The peak of the loss of one batch without gradients, beside what stays between steps. None where it is not
    known: a step of a person's own, or weights that are spread over several GPUs."""
    if job.own_step is not None or (options.num_ranks > 1 and options.parallel != "ddp"):
        return None
    values = Values(options.routing)
    recorder = Recorder(processors=gpu.processors, workspace_bytes=gpu.workspace_bytes, values=values)
    rules = CudaRules(
        _LOW.get(options.precision), has_flash=gpu.has_flash_attention, has_cudnn=gpu.has_cudnn_attention
    )
    with _explained(job.name), own_chance(), _no_collections(), torch.no_grad():
        model = _build(job, options, values).eval()
        for tensor in _weights(model):
            recorder.add(tensor, "weights")
        with torch.device("meta"), leaf_functions(), rules.answers(), recorder, rules, Questions(values):
            batch = job.batch(micro_batch)
            with rules.autocast():
                job.loss(model, batch)
        weights_bytes = sum(tensor.nbytes for tensor in _weights(model))
        model.train()
    return state_bytes - weights_bytes + recorder.finish().peak_bytes


def _on_ranks(trace: Trace, model: nn.Module, options: StepOptions) -> Trace:
    if options.num_ranks == 1:
        return trace
    gradients = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    weights = sum(weight.nbytes for weight in model.parameters())
    sent = wire_bytes(options.parallel, options.num_ranks, gradients, weights)
    trace = replace(trace, wire_bytes=sent)
    if options.parallel == "ddp":
        return trace
    share, kept = trace.update_bytes // options.num_ranks, trace.state_bytes // options.num_ranks
    return shard(replace(trace, update_bytes=share, state_bytes=kept), options.num_ranks, block_bytes(model))


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Python's garbage collector stays off: tensors in a reference cycle (the output of some models) live as long as
    in a real step, which makes too few objects for a collection. It is also a fifth of the time of a trace."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _weights(model: nn.Module) -> Iterator[Tensor]:
    yield from (weight.data for weight in model.parameters())
    yield from model.buffers()


def _slice(recorder: Recorder, rules: CudaRules, job: Job, model: nn.Module, micro_batch: int) -> None:
    recorder.part = "activations"
    batch = job.batch(micro_batch)
    recorder.part = "temporaries"
    recorder.phase = "forward"
    begin = recorder.mark()
    with rules.autocast():
        loss = job.loss(model, batch)
    # What outlives the forward pass is kept for the backward pass; the rest was temporary.
    recorder.label(recorder.survivors(begin), "activations")
    recorder.phase = "backward"
    torch.autograd.backward(loss)


def _label_gradients(recorder: Recorder, trained: list[nn.Parameter]) -> None:
    for weight in trained:
        if weight.grad is not None:
            recorder.add(weight.grad, "gradients")


def replay(trace: Trace, micro_batch: int, *, is_expandable: bool, cap_bytes: int | None = None) -> Prediction:
    """Replay the trace through the allocator. Raises ArenaFull when it does not fit under `cap_bytes`."""
    arena = Arena(is_expandable=is_expandable, cap_bytes=cap_bytes)
    allocations = trace.allocations
    now: dict[Part, int] = {}
    best: dict[Part, int] = {}
    phase = ""
    for event in trace.events:
        made = allocations[event if event >= 0 else ~event]
        if made.num_bytes == 0:
            continue
        if event >= 0:
            arena.allocate(event, made.num_bytes)
            now[made.part] = now.get(made.part, 0) + made.num_bytes
            if arena.allocated_bytes == arena.peak_allocated_bytes:
                best, phase = dict(now), made.phase
        else:
            arena.free(~event)
            now[made.part] -= made.num_bytes
    # The bytes lost to rounding up to 512 belong to no part: they are added to the largest one.
    largest = max(best, key=lambda part: best[part])
    best[largest] += arena.peak_allocated_bytes - sum(best.values())
    return Prediction(
        micro_batch,
        arena.peak_allocated_bytes,
        arena.peak_reserved_bytes,
        best,
        phase,
        trace.unknowns,
        trace.assumptions,
    )


def predict(
    job: Job, micro_batch: int, gpu: GpuModel, options: StepOptions | None = None, *, is_accumulating: bool = True
) -> Prediction:
    options = options or job.options
    trace = trace_step(job, micro_batch, gpu, options, is_accumulating=is_accumulating)
    return replay(trace, micro_batch, is_expandable=options.is_expandable)


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise CannotTrace(
            f"{name} cannot be traced without a GPU: {_first_line(error)}",
            detail=(f"at {_place(error)}",) if _place(error) else (),
            hint="the rehearsal before step 0 measures it instead; or give shapes that do not depend on values",
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _place(error: BaseException) -> str:
    """The last line of code that is neither torch's nor ours."""
    ours = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/torch/" not in frame.filename and not frame.filename.startswith(ours):
            return f"{frame.filename}:{frame.lineno} `{frame.line}`"
    return ""


def meta_copy(model: nn.Module) -> nn.Module:
    """The same module with weights that have shapes and no values. It costs no memory: no values are copied."""
    memo: dict[int, Any] = {}
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        keep_value(memo[id(buffer)], buffer)
    return copy.deepcopy(model, memo)


_SHARED = frozenset({"weights", "gradients", "optimizer"})
_GATHERED = 2  # whole blocks of weights at a time: the one in use and the next
_REDUCED = 2  # whole blocks of gradients: the one being made and the one being sent


def add_buckets(recorder: Recorder, trained: list[nn.Parameter]) -> None:
    recorder.reserve([sum(weight.nbytes for weight in trained)], "communication")


def shard(trace: Trace, num_ranks: int, block_bytes: int) -> Trace:
    """The trace of one of `num_ranks` FSDP2 ranks. `block_bytes` are the weights of the largest block."""
    made = tuple(
        replace(one, num_bytes=-(-one.num_bytes // num_ranks)) if one.part in _SHARED else one
        for one in trace.allocations
    )
    held = (_GATHERED + _REDUCED) * block_bytes
    extra = replace(trace.allocations[0], num_bytes=held, part="communication", scratch=None)
    return replace(trace, allocations=(*made, extra), events=(len(made), *trace.events))


def block_bytes(model: nn.Module) -> int:
    """The weights of the largest block: blocks are the modules of the type that repeats and holds most weights."""
    sizes: Counter[type] = Counter()
    counts: Counter[type] = Counter()
    largest: dict[type, int] = {}
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential) and len(parent) > 1:
            for child in parent:
                size = sum(weight.nbytes for weight in child.parameters())
                sizes[type(child)] += size
                counts[type(child)] += 1
                largest[type(child)] = max(size, largest.get(type(child), 0))
    repeated = [kind for kind in sizes if counts[kind] > 1]
    best = max(repeated, key=lambda kind: sizes[kind], default=None)
    outside = max((weight.nbytes for weight in model.parameters()), default=0)
    return max(outside, largest[best]) if best is not None else outside


def wire_bytes(parallel: str, num_ranks: int, gradient_bytes: int, weight_bytes: int) -> int:
    """DDP sends the gradients around a ring, twice. FSDP2 gathers weights twice and reduces gradients once."""
    share = (num_ranks - 1) / num_ranks
    return int(share * (2 * gradient_bytes if parallel == "ddp" else 2 * weight_bytes + gradient_bytes))

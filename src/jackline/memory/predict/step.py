"""The memory of a training step without a GPU: the step runs on the meta device and its allocations are replayed.

Owns the order of a step (slices, backward, optimizer) as the trainer does it, and the labels of what is allocated.
`ranks` owns what several GPUs change. A prediction takes 0.5 to 1.5 s of CPU for a model of 125M. Questions about
values (`.item()`, `nonzero`) are answered by `values`. Code that needs a real device cannot be traced: CannotTrace
says where, and a rehearsal decides instead.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jackline.errors import JacklineError
from jackline.memory.imagined.gpu import imagined_gpu
from jackline.memory.imagined.programs import as_on_gpu, without_fast_path
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.predict.allocator import Arena
from jackline.memory.predict.cuda_rules import CudaRules, leaf_functions
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.optimizers import MetaOptimizer
from jackline.memory.predict.own_step import trace_own_step
from jackline.memory.predict.questions import Questions
from jackline.memory.predict.recurrent import flatten_weights
from jackline.memory.predict.shortcuts import Unfilled
from jackline.memory.predict.trace import Part, Recorder, Trace
from jackline.memory.predict.values import Values, keep_value, own_chance
from jackline.memory.ranks.shards import add_buckets, on_ranks
from jackline.memory.ranks.tensor import take_sent

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COMPILER = "torch._dynamo"
# cuDNN's workspaces were up to an eighth larger than what is assumed for them.
_MOST_REORDERING = 1.25
# Depthwise convolutions in bf16 took up to 2.4 % of the peak that no rule foretells.
_MOST_UNSEEN, _MOST_UNSEEN_RESERVED = 1.03, 1.06
# What a person's code raises wherever it runs.
_MISTAKES = (AttributeError, ImportError, LookupError, NameError, OSError, TypeError)
_ON_A_GPU = "the rehearsal before step 0 measures it instead; or give shapes that do not depend on values"
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
    if options.is_recomputing:
        importlib.import_module(_COMPILER)  # checkpointing would import it in the middle of the trace
    was_imported = _COMPILER in sys.modules
    made = _traced(job, micro_batch, gpu, options, is_accumulating)
    if was_imported or _COMPILER not in sys.modules:
        return made
    # An import of torch's compiler holds on to the arguments of the operator that caused it: only the next trace is
    # that of a step in a process that trains.
    return _traced(job, micro_batch, gpu, options, is_accumulating)


def _traced(job: Job, micro_batch: int, gpu: GpuModel, options: StepOptions, is_accumulating: bool) -> Trace:
    with explained_trace(job.name), own_chance(), _no_collections():
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
    model = _build(job, gpu, options, values).train()
    for tensor in _weights(model):
        recorder.add(tensor, "weights")
    for tensor in flatten_weights(model):
        recorder.add(tensor, "weights")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if options.num_ranks > 1 and options.parallel == "ddp":
        add_buckets(recorder, trained)
    has_kept = False
    sent_bytes = 0 * take_sent(model)
    with contextlib.ExitStack() as around:
        _enter(around, job, gpu, recorder, rules, values)
        optimizer = MetaOptimizer(trained, options)
        for step in range(_NUM_STEPS):
            gc.collect(0)
            recorder.counter.is_on = step == 0
            _slice(recorder, rules, job, model, micro_batch)
            recorder.counter.is_on = False
            sent_bytes = max(sent_bytes, take_sent(model))
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
    made = replace(made, wire_bytes=sent_bytes, num_updated=len(trained))
    return on_ranks(made, model, options)


def _enter(
    around: contextlib.ExitStack, job: Job, gpu: GpuModel, recorder: Recorder, rules: CudaRules, values: Values
) -> None:
    """Everything under which a slice is traced, in the order in which it sees a call last."""
    for one in (torch.device("meta"), leaf_functions(), rules.answers(), as_on_gpu(), recorder, rules):
        around.enter_context(one)
    around.enter_context(Questions(values))
    if job.asks_for_gpu:
        around.enter_context(imagined_gpu(gpu))


def _build(job: Job, gpu: GpuModel, options: StepOptions, values: Values) -> nn.Module:
    asked = imagined_gpu(gpu) if job.asks_for_gpu else contextlib.nullcontext()
    with torch.device("meta"), Unfilled(values), Questions(values), asked:
        model = job.build(options)
        to_meta(model)
        return model.to(torch.bfloat16) if options.precision in ("bf16-weights", "bf16-pure") else model


def to_meta(model: nn.Module) -> None:
    """In place: `torch.Tensor(n)` in a model's code makes a tensor on the CPU whatever the default device is."""
    moved: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in moved:
                    copied = torch.empty_like(tensor, device="meta")
                    if isinstance(tensor, nn.Parameter):
                        copied = nn.Parameter(copied, tensor.requires_grad)
                    else:
                        keep_value(copied, tensor)
                    moved[id(tensor)] = copied
                held[name] = moved[id(tensor)]


def evaluation_bytes(job: Job, micro_batch: int, gpu: GpuModel, options: StepOptions, state_bytes: int) -> int | None:
    """The peak of the loss of one batch without gradients, beside what stays between steps. None where it is not
    known: a step of a person's own, or weights that are spread over several GPUs."""
    if job.own_step is not None or options.is_offloading or (options.num_ranks > 1 and options.parallel != "ddp"):
        return None
    values = Values(options.routing)
    recorder = Recorder(processors=gpu.processors, workspace_bytes=gpu.workspace_bytes, values=values)
    rules = CudaRules(
        _LOW.get(options.precision), has_flash=gpu.has_flash_attention, has_cudnn=gpu.has_cudnn_attention
    )
    with explained_trace(job.name), own_chance(), _no_collections(), torch.no_grad():
        model = _build(job, gpu, options, values).eval()
        for tensor in _weights(model):
            recorder.add(tensor, "weights")
        with contextlib.ExitStack() as around:
            _enter(around, job, gpu, recorder, rules, values)
            around.enter_context(without_fast_path())
            batch = job.batch(micro_batch)
            with rules.autocast():
                job.loss(model, batch)
        weights_bytes = sum(tensor.nbytes for tensor in _weights(model))
        model.train()
    return state_bytes - weights_bytes + recorder.finish().peak_bytes


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
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        made = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise CannotTrace(
            f"the loss of {job.name} is {made}, and a step differentiates one number",
            hint="return (model, batch, loss) with a loss of one number; or let the model return its loss",
        )
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


def chosen_range(trace: Trace, *, is_reserved: bool = False) -> tuple[int, int] | None:
    """The least and the most bytes allocated (or reserved) at the peak where cuDNN chooses how its convolutions
    work. Other workspaces leave other holes, so less memory in use may need more."""
    if not any(one.scratch is not None and one.scratch.is_chosen for one in trace.allocations):
        return None
    found = [
        replay(trace.with_reordering(share), 0, is_expandable=True) for share in (0.0, 0.5, 1.0, _MOST_REORDERING)
    ]
    sizes = [one.peak_reserved_bytes if is_reserved else one.peak_allocated_bytes for one in found]
    unseen = _MOST_UNSEEN_RESERVED if is_reserved else _MOST_UNSEEN
    return min(sizes), max(*sizes, int(sizes[2] * unseen))


def predict(
    job: Job, micro_batch: int, gpu: GpuModel, options: StepOptions | None = None, *, is_accumulating: bool = True
) -> Prediction:
    options = options or job.options
    trace = trace_step(job, micro_batch, gpu, options, is_accumulating=is_accumulating)
    return replay(trace, micro_batch, is_expandable=options.is_expandable)


@contextlib.contextmanager
def explained_trace(name: str) -> Iterator[None]:
    try:
        yield
    except JacklineError:
        raise
    except Exception as error:  # of any kind: it is the model's own code
        raise failed_in(name, error) from error


def failed_in(name: str, error: Exception) -> CannotTrace:
    """What happened, where, and what to do: code that is wrong is told from what only a GPU can do."""
    is_mistake = isinstance(error, _MISTAKES)
    said = _first_line(error)
    if isinstance(error, _MISTAKES):
        said = f"{type(error).__name__}: {said}"
    return CannotTrace(
        f"{name} cannot be traced without a GPU: {said}",
        detail=(f"at {_place(error)}",) if _place(error) else (),
        hint="does this code run as it is? Try one step of it" if is_mistake else _ON_A_GPU,
    )


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

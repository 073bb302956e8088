"""One rank of DDP or FSDP2: what it keeps, what it gathers, what it sends, and what the host holds instead.

Owns the rules of those libraries, applied to the trace of one GPU: an estimate, no rank is imitated. DDP keeps every
gradient a second time, in buckets. FSDP2 keeps a share of weights, gradients and optimizer state, and gathers one
block at a time, with the next one on its way. With its offload policy that share is in host memory, and so is the
update. `tensor` owns tensor parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.trace import Allocation, Recorder, Trace
from jackline.units import format_bytes

_SHARED = frozenset({"weights", "gradients", "optimizer"})
_GATHERED = 2  # whole blocks of weights at a time: the one in use and the next
# Bytes a second of an offloaded training: over PCIe 4, and what an update on the CPU reads and writes.
PCIE = 20e9
HOST_MEMORY = 20e9
_REDUCED = 2  # whole blocks of gradients: the one being made and the one being sent


def add_buckets(recorder: Recorder, trained: list[nn.Parameter]) -> None:
    """DDP's buckets: every gradient a second time."""
    recorder.reserve([sum(weight.nbytes for weight in trained)], "communication")


def on_ranks(trace: Trace, model: nn.Module, options: StepOptions) -> Trace:
    """The trace of one rank."""
    if options.parallel == "tp" or (options.num_ranks == 1 and not options.is_offloading):
        return trace
    gradients = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    weights = sum(weight.nbytes for weight in model.parameters())
    if options.parallel == "ddp":
        return replace(trace, wire_bytes=wire_bytes("ddp", options.num_ranks, gradients, weights))
    ranks = options.num_ranks
    kept = trace.state_bytes // ranks
    shared = replace(
        trace,
        update_bytes=trace.update_bytes // ranks,
        state_bytes=kept,
        wire_bytes=wire_bytes("fsdp", ranks, gradients, weights),
    )
    if options.is_offloading:
        # Weights come to the GPU for each pass, gradients go back; the update runs on the CPU.
        moved = (2 * weights + gradients) // ranks
        shared = replace(shared, host_bytes=kept + gradients // ranks, moved_bytes=moved)
    return _shard(shared, ranks, block_bytes(model), is_offloading=options.is_offloading)


def _shard(trace: Trace, num_ranks: int, largest_block: int, *, is_offloading: bool) -> Trace:
    """`largest_block`: the bytes of the weights of the largest block."""
    made = tuple(
        _kept(one, 0 if is_offloading else -(-one.num_bytes // num_ranks), is_offloading) for one in trace.allocations
    )
    held = (_GATHERED + _REDUCED) * largest_block
    extra = replace(trace.allocations[0], num_bytes=held, part="communication", scratch=None)
    return replace(trace, allocations=(*made, extra), events=(len(made), *trace.events))


def _kept(one: Allocation, share: int, is_offloading: bool) -> Allocation:
    """An update on the CPU takes nothing of the GPU's memory."""
    if one.part in _SHARED:
        return replace(one, num_bytes=share)
    return replace(one, num_bytes=0) if is_offloading and one.phase == "optimizer" else one


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


# Sentences of a plan.

_RANK_WORDS = {"ddp": "DDP", "fsdp": "FSDP2", "tp": "tensor-parallel"}


def rank_notes(job: Job, wire_bytes: int) -> Iterator[str]:
    ranks, how = job.options.num_ranks, job.options.parallel
    others = " or ".join(f"parallel={other}" for other in _RANK_WORDS if other != how)
    yield (
        f"figures are for one of {ranks} {_RANK_WORDS[how]} ranks, estimated; it takes {job.global_batch} samples a"
        f" step and sends {format_bytes(wire_bytes)} ({others} are the other ways); the time for that is not counted"
    )


def host_notes(trace: Trace, num_ranks: int, accumulation: int) -> Iterator[str]:
    all_ranks = f", {format_bytes(trace.host_bytes * num_ranks)} for all {num_ranks}" if num_ranks > 1 else ""
    yield (
        f"offload: weights, gradients and optimizer state are in host memory, {format_bytes(trace.host_bytes)} of RAM"
        f" for a rank{all_ranks}; {format_bytes(trace.moved_bytes * accumulation)} a step between host and GPU, and"
        f" the update on the CPU (assumed: {PCIE / 1e9:.0f} GB/s, {HOST_MEMORY / 1e9:.0f} GB/s)"
    )

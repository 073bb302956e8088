"""Several GPUs: what DDP and FSDP2 add to the memory of a rank, what they take away, and what a rank sends.

DDP keeps every gradient a second time, in buckets. FSDP2 keeps a share of weights, gradients and optimizer state, and
gathers one block at a time, with the next one on its way. The ranks themselves are not imitated: an estimate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import nn

from jackline.memory.predict.trace import Recorder, Trace

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

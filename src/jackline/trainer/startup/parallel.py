"""Several ranks of one training: who this process is, how the model is divided, and what only rank 0 writes.

Started by torchrun (`jackline train RECIPE --nproc N`). Every rank reads the same batches and takes its rows of each
(`share_of`), so data order and global batch do not depend on the number of ranks. With parallel=ddp each rank has all
weights, and `run.safe_step` adds up the gradients once a step. With parallel=fsdp fully_shard divides weights,
gradients and optimizer state. Random numbers are the same on all ranks where a recipe adds to the plain step: what it
draws (masks) must be the same everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from jackline import accelerator
from jackline.data.loader.order import mix
from jackline.errors import UsageError

if TYPE_CHECKING:
    from jackline.memory.plan.gpus import Precision
    from jackline.trainer.config import TrainConfig
    from jackline.trainer.language import Additions


def world_size(environ: Mapping[str, str] = os.environ) -> int:
    """1 for a training of one process."""
    text = environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1


def rank(environ: Mapping[str, str] = os.environ) -> int:
    return int(environ.get("RANK", "0")) if world_size(environ) > 1 else 0


def local_device(device: torch.device) -> torch.device:
    """Each rank of a machine has a GPU of its own."""
    if world_size() == 1 or not accelerator.is_gpu(device):
        return device
    number, count = int(os.environ.get("LOCAL_RANK", "0")), accelerator.count()
    if number >= count:
        raise UsageError(
            f"rank {rank()} would use GPU {number}, and this machine has {count}",
            hint=f"--nproc {count}: one rank for each GPU; device=cpu trains without",
        )
    return torch.device(device.type, number)


def join_ranks(config: TrainConfig, device: torch.device) -> str:
    """Connect to the other ranks; a line about it for people, '' for one process."""
    size = world_size()
    config.check_ranks(size)
    if size == 1:
        return ""
    if not config.is_language:
        raise UsageError(
            f"recipe '{config.recipe}' cannot train with {size} ranks yet", hint="start it without --nproc"
        )
    if config.chat:  # the ranks would have different numbers of answers
        raise UsageError(f"chat=true cannot train with {size} ranks yet", hint="start it without --nproc")
    if os.environ.get("JACKLINE", "").lower() == "off":
        raise UsageError(
            f"JACKLINE=off and {size} ranks: nobody would add up their gradients", hint="leave out --nproc"
        )
    if config.batch_size % size:
        raise UsageError(
            f"batch_size={config.batch_size} cannot be shared by {size} ranks", hint="a multiple of the ranks"
        )
    accelerator.use(device)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    how = "weights divided by fully_shard" if config.parallel == "fsdp" else "gradients added up once a step"
    return f"rank {rank()} of {size}: {config.batch_size // size} of {config.batch_size} sequences a step, {how}"


def _only_with_whole_weights(config: TrainConfig) -> list[tuple[str, Any, Any]]:
    """Settings that nobody has tried on divided weights: name, value, and the value with which they do nothing."""
    by_value = "norm" if not config.clip else config.clip_by
    return [("optimizer", config.optimizer, "adamw"), ("ema", config.ema, 0.0), ("clip_by", by_value, "norm")]


def precision_of_ranks(config: TrainConfig, precision: Precision) -> Precision:
    """Masters of divided weights are not there yet."""
    is_divided = world_size() > 1 and config.parallel == "fsdp"
    return "bf16" if precision == "bf16-weights" and is_divided else precision


def divide(model: nn.Module, config: TrainConfig, additions: Additions) -> None:
    """With parallel=fsdp: block by block, and the rest. Before the optimizer is made.

    The weights are the same on all ranks by now, so each rank may get random numbers of its own.
    """
    _seed_rank(config, type(additions).__name__ != "NoAdditions")
    if world_size() == 1 or config.parallel != "fsdp":
        return
    not_yet = [f"{word}={value}" for word, value, plain in _only_with_whole_weights(config) if value != plain]
    if not_yet:
        raise UsageError(f"parallel=fsdp with {', '.join(not_yet)} is not there yet", hint="--parallel ddp")
    if not additions.can_be_divided:
        raise UsageError(
            f"parallel=fsdp: recipe '{config.recipe}' reads and changes whole weights", hint="--parallel ddp"
        )
    from torch.distributed.fsdp import fully_shard

    blocks: Any = getattr(model, "blocks", ())
    for block in blocks:
        fully_shard(block)
    fully_shard(model)


def _seed_rank(config: TrainConfig, has_additions: bool) -> None:
    """Dropout of its own for each rank, once all of them have built the same weights."""
    if world_size() > 1 and config.dropout and not has_additions:
        torch.manual_seed(mix(config.seed, rank()) >> 1)


def share_of(rows: Any) -> Any:
    """This rank's rows of a batch of all ranks."""
    size = world_size()
    if size == 1:
        return rows
    share = len(rows) // size
    return rows[rank() * share : (rank() + 1) * share]

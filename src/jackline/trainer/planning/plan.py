"""From a config to a memory plan: choosing a micro-batch on this GPU.

Owns the Job that stands for a config (the same model, batch and loss as the loop's). memory/plan/choose.py searches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from jackline import accelerator
from jackline.memory.plan.choose import Plan, Room, plan, room_of
from jackline.memory.plan.gpus import GpuModel, Precision, match_gpu
from jackline.memory.plan.rehearse import corrected_room
from jackline.memory.plan.target import Candidate
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import CannotTrace
from jackline.models.nsa.shape import NSAShape
from jackline.trainer.config import TrainConfig
from jackline.trainer.network import Shape, count_parameters, describe_shape, make_model, shape_of
from jackline.trainer.planning.nsa_memory import make_planned
from jackline.units import format_bytes

TOKENIZER_SIZES = {"gpt2": 50_257, "bytes": 257}


@dataclass(frozen=True)
class Chosen:
    """What the plan made of `micro_batch`, `precision`: for people and the loop. `made`: None when not planned."""

    micro_batch: int
    accumulation: int
    text: str
    made: Plan | None = None
    plan_again: Callable[[Room], Plan] | None = None  # with what a rehearsal has measured


def job_of(config: TrainConfig, shape: Shape, precision: Precision, *, is_on_gpu: bool = True) -> Job:
    # The kernels are for bf16 and float32; what they keep is not what plain torch would.
    has_kernels = is_on_gpu and isinstance(shape, NSAShape) and precision != "fp16"

    def build(options: StepOptions) -> nn.Module:
        make = make_planned if has_kernels else make_model
        return make(shape, is_recomputing=options.is_recomputing, loss_chunk_rows=options.loss_chunk_rows)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        summed: Tensor = model(ids, ids) / float(ids.numel())
        return summed

    return Job(
        name=f"{config.recipe} {config.model}",
        build=build,
        batch=lambda count: torch.zeros((count, config.seq_len), dtype=torch.long),
        loss=loss,
        global_batch=config.batch_size,
        options=StepOptions(
            precision=precision, is_recomputing=config.recompute, loss_chunk_rows=config.loss_chunk_rows
        ),
        can_recompute=True,
        can_chunk_loss=True,
        note=describe_shape(config.model, shape),
    )


def candidate_of(config: TrainConfig, gpu: GpuModel) -> Candidate:
    """For `jackline plan RECIPE`: no data is opened, so the vocabulary is that of the named tokenizer."""
    shape = shape_of(config, TOKENIZER_SIZES.get(config.tokenizer, TOKENIZER_SIZES["gpt2"]))
    wanted = ("bf16-weights" if gpu.has_bf16 else "fp16") if config.precision == "auto" else config.precision
    job = job_of(config, shape, wanted)
    shown: dict[str, object] = {
        "model": config.model,
        "parameters": count_parameters(shape),
        "batch_size": config.batch_size,
        "seq_len": config.seq_len,
        "precision": wanted,
    }
    return Candidate(job, shown)


def choose_micro_batch(
    config: TrainConfig, shape: Shape, precision: Precision, *, is_on_gpu: bool, correction: float | None = None
) -> Chosen:
    """An asked one is kept. On a CPU the whole batch; on a GPU what the traced step says fits.

    `correction` is measured over predicted, from a rehearsal of this run.
    """
    if config.micro_batch:
        return _chosen(config, config.micro_batch, "as asked")
    if not is_on_gpu:
        micro_batch = min(config.batch_size, config.cpu_micro_batch)
        whole = "the whole batch: no micro-batching on a CPU"
        square = "plain attention takes memory with the square of the sequence"
        return _chosen(config, micro_batch, whole if micro_batch == config.batch_size else square)
    gpu = match_gpu(accelerator.name(), accelerator.total_bytes())
    # What this process holds already (context, weights) is in the prediction too. Asked of the driver and not of
    # nvidia-smi, which counts all GPUs of the machine and not those that this process may see.
    free_bytes = accelerator.memory_info()[0] + accelerator.reserved_bytes() + gpu.context_bytes
    try:
        plan_again = partial(plan_on, config, shape, precision, gpu)
        made = plan_again(_room(gpu, free_bytes, correction))
    except CannotTrace as error:
        return _chosen(config, config.batch_size, f"not planned ({error.message}); the rehearsal decides")
    needs = f"predicted {format_bytes(made.device_bytes)} of {format_bytes(gpu.usable_bytes)} on {gpu.name}"
    return replace(_chosen(config, made.micro_batch, f"{made.fit}, {needs}"), made=made, plan_again=plan_again)


def rehearsed(config: TrainConfig, micro_batch: int) -> Chosen:
    """What a rehearsal found to fit."""
    return _chosen(config, micro_batch, "as rehearsed")


def plan_on(config: TrainConfig, shape: Shape, precision: Precision, gpu: GpuModel, room: Room) -> Plan:
    job = config.memory_job(shape, precision) or job_of(config, shape, precision)
    return plan(job, gpu, room=room)


def _room(gpu: GpuModel, free_bytes: int, correction: float | None) -> Room:
    room = room_of(gpu, free_bytes=free_bytes)
    return room if correction is None else corrected_room(room, correction)


def _chosen(config: TrainConfig, micro_batch: int, why: str) -> Chosen:
    accumulation = -(-config.batch_size // micro_batch)
    return Chosen(micro_batch, accumulation, why)

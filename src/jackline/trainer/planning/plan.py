"""From a config to a memory plan: choosing a micro-batch on this GPU.

Owns the Job that stands for a config (the same model, batch and loss as the loop's). memory/plan/choose.py searches.

A plan is made on machines without Triton, so the kernels of sparse attention cannot be traced there; stand-ins take
their place. Each branch keeps what a flash attention keeps (queries, keys, values, output, one number a row), and
that the plan knows. The choice of blocks and the partial results of the selected branch come on top. What a
rehearsal measures corrects the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline import accelerator
from jackline.memory.plan.calibration import Calibration, calibrated_room, calibration_of
from jackline.memory.plan.choose import Plan, Room, plan, room_of
from jackline.memory.plan.gpus import GpuModel, Precision, match_gpu
from jackline.memory.plan.rehearse import corrected_room
from jackline.memory.plan.target import Candidate
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import CannotTrace
from jackline.models.nsa import blocks
from jackline.models.nsa.attention import SparseAttention
from jackline.models.nsa.model import NSAModel, SparseBlock
from jackline.models.nsa.reference import Branches, Memory
from jackline.models.nsa.shape import NSAShape
from jackline.trainer.config import TrainConfig
from jackline.trainer.network import Shape, count_parameters, describe_shape, make_model, shape_of
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
    has_kernels = is_on_gpu and isinstance(shape, NSAShape) and not shape.is_dense and precision != "fp16"

    def build(options: StepOptions) -> nn.Module:
        make = make_planned if has_kernels else make_model
        return make(shape, is_recomputing=options.is_recomputing, loss_chunk_rows=options.loss_chunk_rows)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        summed: Tensor = model(ids, ids) / float(ids.numel())
        return summed

    return Job(
        name=f"{config.recipe} {config.model}{' dense' if isinstance(shape, NSAShape) and shape.is_dense else ''}",
        build=build,
        batch=lambda count: torch.zeros((count, config.seq_len), dtype=torch.long),
        loss=loss,
        global_batch=config.batch_size,
        options=StepOptions(
            precision=precision,
            is_recomputing=config.recompute,
            loss_chunk_rows=config.loss_chunk_rows,
            algorithm=config.optimizer,
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
    gpu = gpu_here() if is_on_gpu else None
    free_bytes = room_on(gpu, config.max_gpu_bytes) if gpu is not None else 0  # limits the allocator too
    if config.micro_batch:
        return _chosen(config, config.micro_batch, "as asked")
    if gpu is None:
        micro_batch = min(config.batch_size, config.cpu_micro_batch)
        whole = "the whole batch: no micro-batching on a CPU"
        square = "plain attention takes memory with the square of the sequence"
        return _chosen(config, micro_batch, whole if micro_batch == config.batch_size else square)
    free_bytes -= 4 * count_parameters(shape) if config.ema else 0  # the average, which no plan counts
    try:
        plan_again = partial(plan_on, config, shape, precision, gpu)
        job = planned_job(config, shape, precision)
        known = calibration_of(gpu, job.name, job.options) if correction is None else Calibration()
        made = plan_again(calibrated_room(_room(gpu, free_bytes, correction), known))
    except CannotTrace as error:
        return _chosen(config, config.batch_size, f"not planned ({error.message}); the rehearsal decides")
    needs = predicted_text(made, config.max_gpu_bytes)
    earlier = f", {known.memory - 1:+.1%} as measured here before" if known.is_same_job else ""
    text = f"{made.fit}, {needs}{earlier}"
    return replace(_chosen(config, made.micro_batch, text), made=made, plan_again=plan_again)


def gpu_here() -> GpuModel:
    return match_gpu(accelerator.name(), accelerator.total_bytes())


def predicted_text(made: Plan, most_bytes: int) -> str:
    whole = min(made.gpu.usable_bytes, most_bytes) if most_bytes else made.gpu.usable_bytes
    return f"predicted {format_bytes(made.device_bytes)} of {format_bytes(whole)} on {made.gpu.name}"


def room_on(gpu: GpuModel, most_bytes: int) -> int:
    """What this process may use of the GPU: what is free, and at most `most_bytes` (0: all), held by the allocator.

    What it holds already (context, weights) is in a prediction too. Asked of the driver and not of nvidia-smi, which
    counts all GPUs of the machine and not those that this process may see.
    """
    free_bytes, total_bytes = accelerator.memory_info()
    free_bytes += accelerator.reserved_bytes() + gpu.context_bytes
    if not most_bytes:
        return free_bytes
    accelerator.limit_memory(min(1.0, max(0, most_bytes - gpu.context_bytes) / total_bytes))
    return min(free_bytes, most_bytes)


def rehearsed(config: TrainConfig, micro_batch: int) -> Chosen:
    """What a rehearsal found to fit."""
    return _chosen(config, micro_batch, "as rehearsed")


def plan_on(config: TrainConfig, shape: Shape, precision: Precision, gpu: GpuModel, room: Room) -> Plan:
    return plan(planned_job(config, shape, precision), gpu, room=room)


def planned_job(config: TrainConfig, shape: Shape, precision: Precision) -> Job:
    return config.memory_job(shape, precision) or job_of(config, shape, precision)


def _room(gpu: GpuModel, free_bytes: int, correction: float | None) -> Room:
    room = room_of(gpu, free_bytes=free_bytes)
    return room if correction is None else corrected_room(room, correction)


def _chosen(config: TrainConfig, micro_batch: int, why: str) -> Chosen:
    accumulation = -(-config.batch_size // micro_batch)
    return Chosen(micro_batch, accumulation, why)


def make_planned(shape: Any, *, is_recomputing: bool, loss_chunk_rows: int) -> NSAModel:
    """The model with stand-ins for its kernels; its values mean nothing."""
    assert isinstance(shape, NSAShape)
    model = NSAModel(shape, is_recomputing=is_recomputing, loss_chunk_rows=loss_chunk_rows)
    for block in model.blocks:
        assert isinstance(block, SparseBlock)
        block.attention = PlannedAttention(shape)
    return model


class PlannedAttention(SparseAttention):
    def _turn(self, query: Tensor, projected: Tensor) -> tuple[Tensor, Memory]:
        groups, width = self.shape.num_groups, self.shape.head_width
        parts = projected.view(*projected.shape[:2], 6, groups, width).unbind(dim=2)
        turned = [part if number % 2 else _turned(part) for number, part in enumerate(parts)]
        return _turned(query), Memory(*turned)

    def _read(self, query: Tensor, memory: Memory) -> Branches:
        memory = Memory(*(part.to(query.dtype) for part in memory))
        length, shape = query.shape[1], self.shape
        keys, values = (blocks.compress(part, shape) for part in memory[:2])
        compressed = _attend(query, keys, values) if shape.num_compressed(length) else torch.zeros_like(query)
        window = _attend(query, memory.window_keys, memory.window_values)
        selection = blocks.every_block(query.shape[0], length, shape, query.device)
        selected = _attend(query, memory.selected_keys, memory.selected_values)
        if length > shape.reads_everything_up_to:
            selection = selection[..., : shape.num_blocks].contiguous()
            selected = _Partial.apply(selected, selection)  # type: ignore[no-untyped-call]
        return Branches(compressed, selected, window, selection)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
    return functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True).transpose(1, 2)


def _turned(heads: Tensor) -> Tensor:
    found: Tensor = _Turned.apply(heads)  # type: ignore[no-untyped-call]
    return found


class _Turned(torch.autograd.Function):
    """A turn keeps nothing for the way back but its angles. Its twenty small operators, each way and in every layer,
    were a third of the time of a plan."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor) -> Tensor:
        return heads.new_empty(heads.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.new_empty(gradient.shape)


class _Partial(torch.autograd.Function):
    """One partial result for each query and slot, alive only inside the operator, and the plan of blocks kept."""

    @staticmethod
    def forward(ctx: Any, selected: Tensor, selection: Tensor) -> Tensor:
        ctx.save_for_backward(selection, torch.empty_like(selection))
        ctx.slots = selection.shape[-1]
        partial = selected.new_empty((ctx.slots, *selected.shape))
        del partial
        return selected.view_as(selected)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        partial = gradient.new_empty((ctx.slots, *gradient.shape))
        del partial
        return gradient, None

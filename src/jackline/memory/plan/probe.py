"""A plan for a model that cannot be traced: a few real steps on the GPU, and a straight line through their peaks.

Owns the trial steps. Needs the GPU the plan is for; `plan` needs no GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from jackline import accelerator
from jackline.memory.guard.oom import is_out_of_memory
from jackline.memory.guard.safe_step import free_caches
from jackline.memory.plan.choose import MARGIN_AFTER_REHEARSAL, Plan, Room, room_of, split_batch
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.rehearse import CpuMeter, GpuMeter, Meter, Peaks
from jackline.memory.predict.job import Job
from jackline.memory.predict.step import Prediction

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def has_gpu() -> bool:
    return accelerator.is_available()


def plan_by_measuring(job: Job, gpu: GpuModel, *, device: str = "cuda", room: Room | None = None) -> Plan:
    """Steps with one and two samples give the line. The chosen micro-batch is then really run, and made smaller until
    it fits."""
    room = room or Room(room_of(gpu).gpu_bytes, MARGIN_AFTER_REHEARSAL)
    trials = _Trials(job, device, room.budget_bytes)
    one, two = trials.peaks(1), trials.peaks(2) if job.global_batch > 1 else None
    largest = _on_the_line(one, two, room.budget_bytes, job.global_batch)
    micro_batch, accumulation = split_batch(job.global_batch, largest)
    peaks = trials.peaks(micro_batch)
    while peaks is None and micro_batch > 1:
        largest = micro_batch * 9 // 10 if micro_batch > 10 else micro_batch - 1
        micro_batch, accumulation = split_batch(job.global_batch, largest)
        peaks = trials.peaks(micro_batch)
    measured = peaks or Peaks(room.gpu_bytes, room.gpu_bytes)
    return Plan(
        job=job.name,
        gpu=gpu,
        options=job.options,
        global_batch=job.global_batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        max_micro_batch=largest if peaks is not None else 0,
        fit="fits" if peaks is not None else "no",
        prediction=Prediction(
            micro_batch,
            measured.allocated_bytes,
            measured.reserved_bytes,
            {"measured": measured.allocated_bytes},
            "a measured step",
        ),
        room=room,
        notes=("measured by real steps on this GPU, because the model cannot be traced",),
    )


def _on_the_line(one: Peaks | None, two: Peaks | None, budget_bytes: int, global_batch: int) -> int:
    if one is None:
        return 0
    if two is None:
        return 1
    a_sample = two.allocated_bytes - one.allocated_bytes
    if a_sample <= 0:
        return global_batch
    return max(1, min(global_batch, 1 + (budget_bytes - one.allocated_bytes) // a_sample))


class _Trials:
    def __init__(self, job: Job, device: str, budget_bytes: int) -> None:
        self._job, self._device, self._budget = job, device, budget_bytes
        with torch.device(device):
            self._model = job.build(job.options).to(device).train()
        is_on_gpu = accelerator.is_gpu(device)
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(weights, lr=0.0, fused=is_on_gpu)
        held = [*self._model.parameters(), *self._model.buffers()]
        self._meter: Meter = GpuMeter() if is_on_gpu else CpuMeter(held)

    def peaks(self, micro_batch: int) -> Peaks | None:
        """The peaks of two updates with two slices each; None when they run out of memory or exceed the budget."""
        measured: Peaks | None = None
        try:
            measured = self._meter.measure(lambda: self._steps(micro_batch))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self._optimizer.zero_grad(set_to_none=True)
        free_caches()
        return measured if measured is not None and measured.allocated_bytes <= self._budget else None

    def _steps(self, micro_batch: int) -> None:
        low = _LOW.get(self._job.options.precision)
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if low is not None:
            autocast = lambda: torch.autocast(self._device, dtype=low)  # noqa: E731
        for _ in range(2):
            for _ in range(2 if self._job.global_batch > micro_batch else 1):
                with torch.device(self._device), autocast():
                    loss = self._job.loss(self._model, self._job.batch(micro_batch))
                loss.backward()  # type: ignore[no-untyped-call]
                del loss
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

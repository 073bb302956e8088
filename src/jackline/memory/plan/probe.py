"""Real steps on the GPU: a plan for a model that cannot be traced, and `plan --measure` for one that can.

Owns the trial steps. Needs the GPU the plan is for; `plan` needs no GPU.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jackline import accelerator
from jackline.errors import UsageError
from jackline.memory.guard.oom import is_out_of_memory
from jackline.memory.guard.safe_step import free_caches
from jackline.memory.plan.choose import MARGIN_AFTER_REHEARSAL, Plan, Room, room_of, split_batch
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.rehearse import CpuMeter, GpuMeter, Meter, Peaks
from jackline.memory.predict.job import Job
from jackline.memory.predict.step import Prediction

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEAST_STEPS = 3
_MOST_STEPS = 40
_LEAST_TIMED_S = 1.0
# Microseconds of a linear layer on next to nothing, forward and backward, when the estimate of a step was fitted.
_USUAL_US = 118.0
_NUM_LAYERS = 100
_PLAUSIBLE = (0.4, 3.0)


def has_gpu() -> bool:
    return accelerator.is_available()


def start_factor(device: str = "cuda") -> float:
    """How much longer Python needs on this machine to start an operator than where the estimate was fitted: a fifth
    of a second. 1.0 where that cannot be measured."""
    with contextlib.suppress(RuntimeError):
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(_NUM_LAYERS))).to(device)
        value = torch.zeros(1, 8, device=device)

        def step() -> None:
            layers(value).sum().backward()

        step()
        found_us = 1e6 * statistics.median(_timed(step, device) for _ in range(9)) / _NUM_LAYERS
        low, high = _PLAUSIBLE
        return min(high, max(low, found_us / _USUAL_US))
    return 1.0


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


@dataclass(frozen=True)
class Measured:
    """A planned step as it really was."""

    allocated_bytes: int
    reserved_bytes: int
    step_s: float
    num_steps: int


def measure_plan(job: Job, made: Plan, *, device: str = "cuda") -> Measured | None:
    """Two updates for the memory, then steps until three are done and a second is over. None: out of memory."""
    if job.own_step is None and (job.options.algorithm != "adamw" or job.options.num_ranks > 1):
        raise UsageError(
            "--measure runs AdamW on one GPU", hint="leave it out, or measure with --optimizer adamw and one GPU"
        )
    try:
        trials = _OwnTrials(job, device) if job.own_step is not None else _Trials(job, device, 2**62)
        peaks = trials.peaks(made.micro_batch)
        if peaks is None:
            return None
        slices: list[float] = []
        updates: list[float] = []
        while len(slices) < _LEAST_STEPS or (sum(slices) < _LEAST_TIMED_S and len(slices) < _MOST_STEPS):
            slices.append(_timed(lambda: trials.slice(made.micro_batch), device))
            updates.append(_timed(trials.update, device))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    step_s = made.accumulation * statistics.median(slices) + statistics.median(updates)
    return Measured(peaks.allocated_bytes, peaks.reserved_bytes, step_s, len(slices))


def _timed(act: Callable[[], None], device: str) -> float:
    began_s = time.perf_counter()
    act()
    if accelerator.is_gpu(device):
        accelerator.synchronize()
    return time.perf_counter() - began_s


class _OwnTrials:
    """A person's own step: updates are part of it."""

    def __init__(self, job: Job, device: str) -> None:
        assert job.own_step is not None
        self._device = device
        self._meter: Meter = GpuMeter() if accelerator.is_gpu(device) else CpuMeter()
        with torch.device(device):
            self._step = job.own_step()

    def peaks(self, micro_batch: int) -> Peaks | None:
        def twice() -> None:
            for _ in range(2):
                self.slice(micro_batch)

        return self._meter.measure(twice)

    def slice(self, micro_batch: int) -> None:
        with torch.device(self._device), contextlib.redirect_stdout(sys.stderr):
            self._step(micro_batch)

    def update(self) -> None:
        return


def _on_the_line(one: Peaks | None, two: Peaks | None, budget_bytes: int, global_batch: int) -> int:
    if one is None:
        return 0
    if two is None:
        return 1
    a_sample = two.allocated_bytes - one.allocated_bytes
    if a_sample <= 0:
        return global_batch
    return max(1, min(global_batch, 1 + (budget_bytes - one.allocated_bytes) // a_sample))


def _filled(model: nn.Module, device: str) -> nn.Module:
    """On the device. A model that was built on the meta device has no values yet: it gets small random ones."""
    if not any(weight.is_meta for weight in model.parameters()):
        return model.to(device)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.02)
        for buffer in model.buffers():
            buffer.zero_()
    return model


class _Trials:
    def __init__(self, job: Job, device: str, budget_bytes: int) -> None:
        self._job, self._device, self._budget = job, device, budget_bytes
        with torch.device(device):
            self._model = _filled(job.build(job.options), device).train()
            if job.options.precision in ("bf16-weights", "bf16-pure"):
                self._model = self._model.to(torch.bfloat16)
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
        for _ in range(2):
            for _ in range(2 if self._job.global_batch > micro_batch else 1):
                self.slice(micro_batch)
            self.update()

    def slice(self, micro_batch: int) -> None:
        low = _LOW.get(self._job.options.precision)
        autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if low is not None:
            autocast = torch.autocast(self._device, dtype=low)
        with torch.device(self._device):
            batch = self._job.batch(micro_batch)
            with autocast:
                loss = self._job.loss(self._model, batch)
            loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

"""Before step 0: one real micro-batch, update and validation batch, measured, and everything put back.

Owns what is rehearsed and what follows: a smaller micro-batch when it does not fit, and how long a step takes. The
measuring and the putting back are memory/plan/rehearse.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jackline import accelerator
from jackline.errors import JacklineError
from jackline.memory.guard.oom import read_numbers
from jackline.memory.plan.calibration import note_measured
from jackline.memory.plan.rehearse import (
    CpuMeter,
    GpuMeter,
    Meter,
    Peaks,
    Rehearsal,
    compare_with_plan,
    corrected_room,
    correction_of,
    must_plan_again,
    rehearse,
)
from jackline.rundir.layout import RunDir
from jackline.rundir.records.memory import MemoryRecord, RehearsedRecord, read_memory, write_memory
from jackline.trainer.config import identity
from jackline.trainer.report.console import Console
from jackline.trainer.startup import compiling
from jackline.trainer.task import Task
from jackline.units import format_bytes, format_duration


@dataclass(frozen=True)
class Rehearsed:
    """`step_s` is what a whole step took, `window_s` the validation of one window; no compilation is in them."""

    micro_batch: int
    step_s: float
    reserved_bytes: int
    window_s: float = 0.0
    against_plan: MemoryRecord = field(default_factory=MemoryRecord)  # measured and predicted, where it was planned


class _TimedMeter:
    """Measures an act, then times it once more without the measuring, which on a CPU slows it down."""

    def __init__(self, inner: Meter, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self.seconds: list[float] = []

    def measure(self, act: Callable[[], object]) -> Peaks:
        peaks = self._inner.measure(act)
        began_s = time.perf_counter()
        act()
        if accelerator.is_gpu(self._device):
            accelerator.synchronize()
        self.seconds.append(time.perf_counter() - began_s)
        return peaks


def rehearse_step(task: Task, console: Console, run: RunDir | None = None) -> Rehearsed:
    """Shrinks the micro-batch until it fits; one that leaves much unused grows once. Losses afterwards are bit for
    bit those without a rehearsal. One that an earlier attempt of the run did on the same device is not done again.
    """
    if run is not None and (before := _remembered(run, task)) is not None:
        fits = f"micro-batch {before.micro_batch} fits, {format_bytes(before.reserved_bytes)}"
        console.say(f"{fits}: measured earlier on the same device", "rehearsal")
        return before
    good = _fit(task, task.chosen.micro_batch, console)
    better = _planned_anew(task, good, console)
    against = _against_plan(task, good)
    _calibrate(task, good, against)
    if better and better != good.micro_batch:
        tried = _attempt(task, better, console)
        good = tried if not tried.found.failed_act else good
    slices = -(-task.config.batch_size // good.micro_batch)
    step_s = good.step_s * slices / min(2, slices)
    whole = f", all {task.total_steps:,} about {format_duration(step_s * task.total_steps)}"
    console.say(
        f"fits: {format_bytes(good.found.reserved_bytes)}; a step takes about {format_duration(step_s)}"
        f"{whole if task.config.has_known_end else ''}",
        "rehearsal",
    )
    window_s = good.eval_s / good.micro_batch
    return Rehearsed(good.micro_batch, step_s, good.found.reserved_bytes, window_s, against)


def remember(run: RunDir, task: Task, rehearsed: Rehearsed | None) -> None:
    """memory.json, once the run's folder is one: what was measured against what was predicted, and that it fits."""
    if rehearsed is None:
        return
    found = RehearsedRecord(
        *_conditions(task), rehearsed.micro_batch, rehearsed.step_s, rehearsed.reserved_bytes, rehearsed.window_s
    )
    write_memory(run, replace(rehearsed.against_plan, rehearsed=found))


def _remembered(run: RunDir, task: Task) -> Rehearsed | None:
    """Of an attempt before, when neither device nor settings have changed since (--continue-with-changes may)."""
    record = read_memory(run)
    found = record.rehearsed
    if (found.device, found.settings) != _conditions(task) or not found.is_whole:
        return None
    known = (found.micro_batch or 0, found.step_s or 0.0, found.reserved_bytes or 0, found.window_s or 0.0)
    return Rehearsed(*known, against_plan=replace(record, rehearsed=RehearsedRecord()))


def _conditions(task: Task) -> tuple[str, dict[str, Any]]:
    """What a rehearsal is true for, as JSON has it."""
    settings: dict[str, Any] = json.loads(json.dumps(identity(task.config)))
    return task.learner.device_name, settings


@dataclass(frozen=True)
class _Attempt:
    micro_batch: int
    found: Rehearsal
    step_s: float
    eval_s: float


def _attempt(task: Task, micro_batch: int, console: Console) -> _Attempt:
    # Whether an earlier attempt's cache helps is known to compiling.py, and was said; the longer of the two is told.
    is_compiled = getattr(task.learner.model, "_compiled_call_impl", None) is not None
    first = f"; compiles first, up to {compiling.COLD_S:.0f} s" if is_compiled else ""
    with console.phase("rehearsal", f"one step at micro-batch {micro_batch}, measured and undone{first}"):
        return _Attempt(micro_batch, *_try(task, micro_batch))


def _fit(task: Task, micro_batch: int, console: Console) -> _Attempt:
    while True:
        tried = _attempt(task, micro_batch, console)
        if not tried.found.failed_act:
            return tried
        if micro_batch == 1:
            raise JacklineError(
                f"one sequence of {task.config.seq_len} tokens does not fit: {_why(tried.found.error)}",
                hint=f"`jackline plan {task.config.recipe} --explain` shows where it goes and what saves some",
            )
        console.say(
            f"micro-batch {micro_batch} does not fit in the {tried.found.failed_act}: trying half", "rehearsal"
        )
        micro_batch = max(1, micro_batch // 2)


def _why(error: str) -> str:
    numbers = read_numbers(error)
    if numbers.wanted_bytes is None:
        return error.splitlines()[0]
    return f"out of GPU memory, needed {format_bytes(numbers.wanted_bytes)}{numbers.free_text()}"


def _against_plan(task: Task, tried: _Attempt) -> MemoryRecord:
    made = task.chosen.made
    if made is None or tried.micro_batch != made.micro_batch:
        return MemoryRecord()
    return compare_with_plan(made.prediction, tried.found)


def _calibrate(task: Task, tried: _Attempt, against: MemoryRecord) -> None:
    """The next plan on this machine knows what was measured here."""
    made = task.chosen.made
    if made is None or against.usable_correction is None:
        return
    slices = -(-task.config.batch_size // tried.micro_batch)
    step_s = tried.step_s * slices / min(2, slices)
    time_ratio = step_s / made.time.seconds if made.time is not None and step_s > 0 else None
    note_measured(made, against.usable_correction, time_ratio)


def _planned_anew(task: Task, tried: _Attempt, console: Console) -> int:
    """The micro-batch of a plan that knows what was measured, where it differs by more than 3 %; 0: stay."""
    made, plan_again = task.chosen.made, task.chosen.plan_again
    if made is None or plan_again is None or tried.micro_batch != made.micro_batch:
        return 0
    correction = correction_of(made.prediction, tried.found)
    off = f"measured {format_bytes(tried.found.allocated_bytes)}, {correction - 1:+.1%} of what was predicted"
    if not must_plan_again(correction, tried.found):
        console.say(off, "rehearsal")
        return 0
    again = plan_again(corrected_room(made.room, correction))
    console.say(f"{off}: planned anew, micro-batch {again.micro_batch} ({again.fit})", "rehearsal")
    return again.micro_batch if again.fit != "no" else 0


def _try(task: Task, micro_batch: int) -> tuple[Rehearsal, float, float]:
    config, learner = task.config, task.learner
    model, scaler = learner.model, learner.scaler
    window = task.blank_batch(micro_batch)
    # A second slice meets the gradients of the first: more memory than one alone.
    num_slices = min(2, -(-config.batch_size // micro_batch))

    def step() -> None:
        task.begin_step(task.hardest_step)
        for _ in range(num_slices):
            total, count = task.loss_sum(window)
            mean = total / (count * num_slices)
            (mean if scaler is None else scaler.scale(mean)).backward()
        learner.move_weights()  # not `update`: what a recipe keeps beside the weights (an average) is not put back
        learner.forget_gradients()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            task.eval_sum(window)
        model.train()

    held = [*model.parameters(), *model.buffers()]
    meter = _TimedMeter(GpuMeter() if accelerator.is_gpu(learner.device) else CpuMeter(held), learner.device)
    acts = {"step": step, "evaluation": evaluate}
    found = rehearse(acts, model, learner.optimizer, scaler=scaler, meter=meter)
    step_s, eval_s = (*meter.seconds, 0.0, 0.0)[:2]
    return found, step_s, eval_s

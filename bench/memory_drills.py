"""The drills of bench/memory.py: simulated GPUs, and running out of memory on purpose. Both need a GPU.

Run through memory_stage.py, in processes of their own.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from memory_grid import CARD, GIB, Write, autocast, build, job_of
from torch import Tensor, nn

from jackline.memory.guard.oom import is_out_of_memory
from jackline.memory.guard.safe_step import SafeStep, free_caches
from jackline.memory.plan.choose import MARGIN_AFTER_REHEARSAL, MARGIN_BEFORE_REHEARSAL, largest_that
from jackline.memory.plan.scale import make_line
from jackline.memory.predict.allocator import ArenaFull
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import replay, trace_step
from jackline.memory.predict.trace import Trace
from jackline.models.shapes import GPT2_VOCAB

# Simulated GPUs.

CAPS_GIB = (8, 12, 15, 24)


def cap_jobs(*, is_smoke: bool) -> list[Job]:
    how = StepOptions("bf16", "fused")
    made = [
        job_of("small", 1024, how),
        job_of("tiny", 1024, how),
        job_of("medium", 512, how),
        job_of("small", 512, replace(how, precision="fp32")),
        job_of("medium", 1024, replace(how, is_recomputing=True)),
        job_of("small", 1024, replace(how, precision="fp32", is_recomputing=True)),
    ]
    return made[1:2] if is_smoke else made


def caps(write: Write, args: argparse.Namespace) -> None:
    started_s = time.monotonic()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.backends.cuda.matmul.allow_tf32 = True
    for job in cap_jobs(is_smoke=args.smoke):
        options = job.options
        length = job.batch(1).shape[1]
        first, second = (trace_step(job, n, CARD, options) for n in (2, 4))
        line = make_line(first, 2, second, 4)
        assert line is not None
        trial = Trial(job.name, length, options)
        for cap_gib in CAPS_GIB[:1] if args.smoke else CAPS_GIB:
            if time.monotonic() - started_s > args.limit_s:
                write({"cut_off": True})
                return
            cap = cap_gib * GIB
            # The workspace is inside the cap; nothing else is: the fraction caps this process's allocator alone.
            chosen = planned(line.at, cap * (1 - MARGIN_BEFORE_REHEARSAL))
            torch.cuda.set_per_process_memory_fraction(cap / total)
            peak = trial.fits(chosen) if chosen else None
            again, ratio = chosen, None
            if peak is not None:
                predicted = replay(line.at(chosen), chosen, is_expandable=True).peak_allocated_bytes
                ratio = peak / predicted
                again = planned(line.at, cap * (1 - MARGIN_AFTER_REHEARSAL) / ratio)
            is_again_fitting = peak is not None and (again == chosen or trial.fits(again) is not None)
            largest = trial.largest(again if is_again_fitting else chosen if peak is not None else 0)
            torch.cuda.set_per_process_memory_fraction(1.0)
            write(
                {
                    "job": f"{job.name} t{length} {options.precision}{' rc' if options.is_recomputing else ''}",
                    "cap_gib": cap_gib,
                    "chosen": chosen,
                    "is_wrong": bool(chosen) and peak is None,
                    "ratio": ratio,
                    "after_rehearsal": again,
                    "is_wrong_after": bool(again) and not is_again_fitting,
                    "largest": largest,
                    "largest_predicted": planned(line.at, cap),
                }
            )
        del trial
        free_caches()


def planned(at: Callable[[int], Trace], budget: float) -> int:
    def fits(count: int) -> bool:
        try:
            replay(at(count), count, is_expandable=True, cap_bytes=int(budget))
        except ArenaFull:
            return False
        return True

    return largest_that(fits, 4096)


class Trial:
    """A model on the GPU, tried with one micro-batch after another."""

    def __init__(self, size: str, length: int, options: StepOptions) -> None:
        self._length, self._precision = length, options.precision
        self._model = build(size, options.is_recomputing)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)

    def fits(self, count: int) -> int | None:
        """Peak allocated of two updates of two slices, None when they do not fit under the cap."""
        free_caches()
        torch.cuda.reset_peak_memory_stats()
        is_over = False
        try:
            self._run(count)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            is_over = True
        self._optimizer.zero_grad(set_to_none=True)
        free_caches()
        return None if is_over else torch.cuda.max_memory_allocated()

    def _run(self, count: int) -> None:
        ids = torch.randint(0, GPT2_VOCAB, (count, self._length), device="cuda")
        for _ in range(2):
            for _ in range(2):
                with autocast(self._precision):
                    loss = self._model(ids, ids) / float(ids.numel())
                loss.backward()
                del loss
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    def largest(self, known: int) -> int:
        """Upwards from one that fits: by an eighth at a time until one does not, then between the two."""
        low, high = known, known + max(1, known // 8)
        while high < 4096 and self.fits(high) is not None:
            low, high = high, high + max(1, high // 8)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) is not None else (low, middle)
        return low


# The drill.


def drill(write: Write, args: argparse.Namespace) -> None:
    """A GPU of 14.5 GiB, 125M in float32, a batch of 32 x 1024: too large, recovered, compared, continued."""
    torch.backends.cuda.matmul.allow_tf32 = False
    length, samples = (256, 16) if args.smoke else (1024, 32)
    cap_gib = 4.0 if args.smoke else 14.5
    model = build("tiny" if args.smoke else "small", False)
    ids = torch.randint(0, GPT2_VOCAB, (samples, length), device="cuda")

    def fn(part: Tensor) -> tuple[Tensor, int]:
        return model(part, part), part.numel()

    def step_at(safe: SafeStep) -> tuple[Any, list[Tensor]]:
        model.zero_grad(set_to_none=True)
        result = safe(fn, ids)
        return result, [w.grad.detach().cpu() for w in model.parameters() if w.grad is not None]

    unshrunk = step_at(SafeStep(model))[1]
    model.zero_grad(set_to_none=True)
    free_caches()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total)
    safe = SafeStep(model)
    started_s = time.monotonic()
    result, ours = step_at(safe)
    recovered_s = time.monotonic() - started_s
    clean = step_at(SafeStep(model, micro_batch=result.micro_batch))[1]
    again = step_at(SafeStep(model, micro_batch=result.micro_batch))[1]
    reserved = go_on(model, safe, fn, ids, num_steps=10 if args.smoke else 100)
    write(
        {
            "shrunk": [vars(change) for change in result.shrunk],
            "micro_batch": result.micro_batch,
            "recovery_s": recovered_s,
            "of_unshrunk": relative_l2(ours, unshrunk),
            "of_clean": relative_l2(ours, clean),
            "two_clean_steps_differ_by": relative_l2(again, clean),
            "reserved": reserved,
        }
    )


def go_on(model: nn.Module, safe: SafeStep, fn: Any, ids: Tensor, *, num_steps: int) -> list[int]:
    """Reserved memory after further steps: the first, the tenth, the last ..."""
    torch.backends.cuda.matmul.allow_tf32 = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    reserved = []
    for _ in range(num_steps):
        model.zero_grad(set_to_none=True)
        safe(fn, ids)
        optimizer.step()
        reserved.append(torch.cuda.memory_reserved())
    return reserved[:: max(1, num_steps // 10)] + reserved[-1:]


def relative_l2(ours: list[Tensor], theirs: list[Tensor]) -> float:
    off = sum(((a.double() - b.double()) ** 2).sum().item() for a, b in zip(ours, theirs, strict=True))
    return math.sqrt(off / max(1e-300, sum((b.double() ** 2).sum().item() for b in theirs)))

"""Before step 0: one real micro-batch, update and validation batch, measured, and everything put back.

Owns what is rehearsed and what follows: a smaller micro-batch when it does not fit, and how long a step takes. The
measuring and the putting back are memory/rehearse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from jackline.errors import JacklineError
from jackline.memory.rehearse import CpuMeter, CudaMeter, Meter, Peaks, Rehearsal, rehearse
from jackline.trainer.build import Parts
from jackline.trainer.planning import Chosen
from jackline.trainer.voice import Voice
from jackline.units import format_bytes, format_duration


@dataclass(frozen=True)
class Rehearsed:
    """`step_s` is what a whole step took; the first one's compilation is not in it."""

    micro_batch: int
    step_s: float
    reserved_bytes: int


class _TimedMeter:
    """Measures an act, then times it once more without the measuring, which on a CPU slows it down."""

    def __init__(self, inner: Meter, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self.seconds: list[float] = []

    def measure(self, act: Callable[[], object]) -> Peaks:
        peaks = self._inner.measure(act)
        began_s = time.perf_counter()
        act()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - began_s)
        return peaks


def rehearse_step(parts: Parts, voice: Voice) -> Rehearsed:
    """Shrinks the micro-batch until it fits. Losses afterwards are bit for bit those without a rehearsal."""
    micro_batch = parts.chosen.micro_batch
    while True:
        with voice.phase("rehearsal", f"one step at micro-batch {micro_batch}, measured and undone"):
            found, step_s = _try(parts, micro_batch)
        if not found.failed_act:
            break
        if micro_batch == 1:
            raise JacklineError(
                f"one sequence of {parts.config.seq_len} tokens does not fit: {found.error.splitlines()[0]}",
                hint=f"`jackline plan {parts.config.recipe} --explain` shows where it goes and what saves some",
            )
        voice.say(f"micro-batch {micro_batch} does not fit in the {found.failed_act}: trying half", "rehearsal")
        micro_batch = max(1, micro_batch // 2)
    slices = -(-parts.config.batch_size // micro_batch)
    step_s *= slices / min(2, slices)
    voice.say(
        f"fits: {format_bytes(found.reserved_bytes)}; a step takes about {format_duration(step_s)}, "
        f"all {parts.total_steps:,} about {format_duration(step_s * parts.total_steps)}",
        "rehearsal",
    )
    return Rehearsed(micro_batch, step_s, found.reserved_bytes)


def _try(parts: Parts, micro_batch: int) -> tuple[Rehearsal, float]:
    config, device = parts.config, parts.device
    window = torch.zeros((micro_batch, config.seq_len + 1), dtype=torch.long, device=device)
    # A second slice meets the gradients of the first: more memory than one alone.
    num_slices = min(2, -(-config.batch_size // micro_batch))

    def step() -> None:
        parts.method.begin_step(parts.method.hardest_step)
        for _ in range(num_slices):
            total, count = parts.loss_sum(window)
            mean = total / (count * num_slices)
            (mean if parts.scaler is None else parts.scaler.scale(mean)).backward()
        parts.move_weights()  # a method's own state (an average) would not be put back
        parts.optimizer.zero_grad(set_to_none=True)

    def evaluate() -> None:
        parts.model.eval()
        with torch.no_grad():
            parts.eval_sum(window)
        parts.model.train()

    held = [*parts.model.parameters(), *parts.model.buffers()]
    meter = _TimedMeter(CudaMeter() if device.type == "cuda" else CpuMeter(held), device)
    acts = {"step": step, "evaluation": evaluate}
    found = rehearse(acts, parts.model, parts.optimizer, scaler=parts.scaler, meter=meter)
    return found, meter.seconds[0] if meter.seconds else 0.0


def with_micro_batch(parts: Parts, micro_batch: int) -> Parts:
    accumulation = -(-parts.config.batch_size // micro_batch)
    return replace(parts, chosen=Chosen(micro_batch, accumulation, "as rehearsed"))

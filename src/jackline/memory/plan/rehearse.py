"""The rehearsal before step 0: it really runs the longest batch, the update, an evaluation and a save, measures them,
and restores everything as it was.

Owns the measuring, the restoring and the comparison with the prediction. The caller passes what is rehearsed as
functions; `plan` chooses another micro-batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from jackline import accelerator
from jackline.memory.guard.oom import is_out_of_memory
from jackline.memory.guard.safe_step import free_caches
from jackline.memory.guard.step_state import Generators, Scaler
from jackline.memory.plan.choose import MARGIN_AFTER_REHEARSAL, Room
from jackline.memory.predict.step import Prediction
from jackline.memory.predict.trace import Recorder
from jackline.rundir.records.memory import MemoryRecord

REPLAN_BEYOND = 0.03


@dataclass(frozen=True)
class Peaks:
    """`device_bytes` is what nvidia-smi shows at the end; 0 where there is no GPU."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int = 0


@dataclass(frozen=True)
class Rehearsal:
    """What each act (a rehearsed function) needed, by name. Acts after one that ran out of memory are missing."""

    peaks: Mapping[str, Peaks]
    failed_act: str = ""
    error: str = ""

    @property
    def allocated_bytes(self) -> int:
        return max((peak.allocated_bytes for peak in self.peaks.values()), default=0)

    @property
    def reserved_bytes(self) -> int:
        return max((peak.reserved_bytes for peak in self.peaks.values()), default=0)


class Meter(Protocol):
    def measure(self, act: Callable[[], object]) -> Peaks: ...


class GpuMeter:
    """The caching allocator's own figures."""

    def measure(self, act: Callable[[], object]) -> Peaks:
        free_caches()
        accelerator.reset_peaks()
        act()
        accelerator.synchronize()
        free_bytes, total_bytes = accelerator.memory_info()
        return Peaks(accelerator.peak_allocated_bytes(), accelerator.peak_reserved_bytes(), total_bytes - free_bytes)


@dataclass
class CpuMeter:
    """Tensors on the CPU, counted as the tracer counts them: the CPU's allocator keeps no such figures."""

    held: Sequence[Tensor] = field(default_factory=tuple)

    def measure(self, act: Callable[[], object]) -> Peaks:
        recorder = Recorder("cpu")
        for tensor in self.held:
            recorder.add(tensor)
        with recorder:
            act()
        peak = recorder.finish().peak_bytes
        return Peaks(peak, peak)


def rehearse(
    acts: Mapping[str, Callable[[], object]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scaler: Any = None,
    meter: Meter | None = None,
) -> Rehearsal:
    """Run the acts in order and measure each. Afterwards weights, buffers, gradients, optimizer, scaler, RNG states
    and train/eval modes are what they were: a run with a rehearsal has the same losses, bit for bit, as one without.

    Weights (and a resumed optimizer's state) are kept in host memory meanwhile: 4 to 12 bytes per weight.
    """
    meter = meter or _meter_of(model)
    peaks: dict[str, Peaks] = {}
    failed_act = error_text = ""
    with _unchanged(model, optimizer, scaler):
        for name, act in acts.items():
            try:
                peaks[name] = meter.measure(act)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failed_act, error_text = name, str(error)
                break
    free_caches()
    return Rehearsal(peaks, failed_act, error_text)


def _meter_of(model: nn.Module) -> Meter:
    """By the device of the model: one on the CPU takes no memory of a GPU that is here too."""
    held = [*model.parameters(), *model.buffers()]
    return GpuMeter() if any(accelerator.is_gpu(tensor.device) for tensor in held) else CpuMeter(held)


@contextmanager
def _unchanged(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Iterator[None]:
    generators, scale = Generators.take(), Scaler(scaler)
    modes = [(module, module.training) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    gradients = [weight.grad for weight in model.parameters()]
    states = _take_states(optimizer)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, kept, strict=True):
                tensor.copy_(copy)
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.grad = gradient
        _put_states_back(optimizer, states)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        for module, is_training in modes:
            module.training = is_training
        scale.put_back()
        generators.put_back()
        gc.collect()


def _take_states(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    return {
        weight: {
            key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value for key, value in state.items()
        }
        for weight, state in optimizer.state.items()
    }


def _put_states_back(optimizer: torch.optim.Optimizer, states: dict[Any, dict[str, Any]]) -> None:
    """A weight that had no state gets none: AdamW makes the state at the first step, and only then counts from 1."""
    for weight in list(optimizer.state):
        if weight not in states:
            del optimizer.state[weight]
            continue
        state = optimizer.state[weight]
        for key, value in states[weight].items():
            if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
                state[key].copy_(value)
            else:
                state[key] = value


# Comparison with the prediction.


def correction_of(predicted: Prediction, measured: Rehearsal) -> float:
    """Measured / predicted: 1.05 means that everything needs 5 % more than the trace says."""
    if not measured.allocated_bytes or not predicted.peak_allocated_bytes:
        return 1.0
    return measured.allocated_bytes / predicted.peak_allocated_bytes


def must_plan_again(correction: float, measured: Rehearsal) -> bool:
    return bool(measured.failed_act) or abs(correction - 1.0) > REPLAN_BEYOND


def corrected_room(room: Room, correction: float) -> Room:
    """The room with the correction and a smaller margin: what no trace can know has now been measured."""
    return Room(room.gpu_bytes, MARGIN_AFTER_REHEARSAL, correction)


def compare_with_plan(predicted: Prediction, measured: Rehearsal) -> MemoryRecord:
    """What was predicted, what was measured, and their ratio. The next attempt plans with it."""
    return MemoryRecord(
        micro_batch=predicted.micro_batch,
        predicted_allocated_bytes=predicted.peak_allocated_bytes,
        predicted_reserved_bytes=predicted.peak_reserved_bytes,
        measured_allocated_bytes=measured.allocated_bytes,
        measured_reserved_bytes=measured.reserved_bytes,
        measured={name: vars(peak) for name, peak in measured.peaks.items()},
        failed_act=measured.failed_act,
        correction=correction_of(predicted, measured),
    )

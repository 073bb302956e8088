"""How long a step takes, from what its operators compute and move, and what the GPU can do.

Owns the counting of operators while a step is traced, and the estimate of its time: Python starts one operator after
the other, the GPU runs them in that order, and each waits for the slower of the two. `kernel_time` owns how long the
kernels of one operator take. Sums over many GPUs and loading of data are not covered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from jackline.memory.plan.gpus import GpuModel
from jackline.memory.predict.kernel_time import (
    Kernel,
    attention_kernel,
    kernel_of,
    recurrent_kernel,
    seconds,
    tensors_of,
)

_VIEW_NAMES = """
    view _unsafe_view transpose permute t expand slice select unsqueeze squeeze detach alias as_strided split unbind
    chunk split_with_sizes diagonal unfold lift_fresh _reshape_alias view_as_real view_as_complex
"""
_VIEWS = frozenset(_VIEW_NAMES.split())
_FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# Microseconds that Python, autograd and the driver need to start an operator: (forward, backward). Fitted to steps of
# an H200 machine that waited for Python, on two thirds of the models; the machine itself was up to 1.5 times as slow
# for some seconds at a time. A loop on the CPU alone, timed for some milliseconds, did not tell how fast it was.
_VIEW_US = (7.4, 6.4)
_OTHER_US = (21.0, 18.0)
_PRODUCT_US = (48.0, 19.0)
_CUDNN_US = (53.0, 53.0)  # cuDNN looks for a kernel each time
_CAST_US = (23.0, 20.0)
_GROUPED_US = (600.0, 600.0)  # in float32 a product for each group, and a look at the offsets
_STARTS_US = {
    "_to_copy": _CAST_US,
    "_grouped_mm": _GROUPED_US,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _PRODUCT_US),
}
_ATTENTION_US = 95.0  # with its checks and transposes
RECURRENT_US = 18.0  # of each step of each layer, one after the other
_WEIGHT_US = 7.4  # of an optimizer's Python for each weight
_STEP_US = 1900.0  # of a step besides: the batch, the loss, the optimizer
_MOSTLY = 0.3  # of the time the GPU waits
# Between the start of an operator and that of its kernel.
_LAUNCH_S = 4.0e-6
_UPDATE_SHARE = 0.73  # of the bandwidth, by a fused update
# Python is up to 1.4 times as slow at times on the same machine; kernels are known better.
_PYTHON_ERROR, _KERNEL_ERROR = 0.35, 0.15


@dataclass(frozen=True)
class Work:
    """One operator: what its kernels do, and until it is started. Stepwise: its first kernels run while later ones
    are started."""

    kernel: Kernel
    start_us: float = _OTHER_US[0]
    name: str = ""
    is_backward: bool = False
    is_stepwise: bool = False


class Counter:
    """Collects the work of one slice while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.done: list[Work] = []
        self.num_views = 0
        self._views_us = 0.0  # of the views since the last operator

    def count(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if not self.is_on or name in _FREE:
            return
        if name in _VIEWS:
            self.num_views += 1
            self._views_us += _VIEW_US[is_backward()]
            return
        if any(True for _ in tensors_of((args, result))):
            self._note(kernel_of(name, args, result), _start_us(name), name)

    def add(
        self, operations: int, tensors: Iterable[Tensor], start_us: float = _ATTENTION_US, steps: int = 0
    ) -> None:
        """The work of a kernel that no operator of the trace stands for: fused attention, or as many steps of a
        recurrent network."""
        if self.is_on:
            made = recurrent_kernel(operations, tensors, steps) if steps else attention_kernel(operations, tensors)
            self._note(made, start_us, "fused", is_stepwise=bool(steps))

    def _note(self, kernel: Kernel, start_us: float, name: str, *, is_stepwise: bool = False) -> None:
        self.done.append(Work(kernel, start_us + self._views_us, name, is_backward(), is_stepwise))
        self._views_us = 0.0


def _start_us(name: str) -> float:
    is_cudnn = "convolution" in name or "batch_norm" in name
    return (_CUDNN_US if is_cudnn else _STARTS_US.get(name, _OTHER_US))[is_backward()]


def is_backward() -> bool:
    """Autograd's thread has no gradients to track, unless it computes a part of the forward pass again."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step. `bound` is what it waits for: products, memory or Python."""

    seconds: float
    error: float
    bound: str

    @property
    def range_s(self) -> tuple[float, float]:
        return self.seconds * (1 - self.error), self.seconds * (1 + self.error)


class Traced(Protocol):
    """What an estimate needs of a trace."""

    @property
    def work(self) -> tuple[Work, ...]: ...
    @property
    def num_updated(self) -> int: ...
    @property
    def update_bytes(self) -> int: ...


def estimate(traced: Traced, gpu: GpuModel, accumulation: int = 1) -> StepTime:
    """The time of a step of `accumulation` slices, on its own: the GPU is idle when it begins."""
    host_s = gpu_s = busy_s = products_s = 0.0
    starting = 1e-6 * gpu.start_factor
    for one in traced.work:
        begin_s, host_s = host_s, host_s + one.start_us * starting
        kernel_s = seconds(one.kernel, gpu.rates, gpu.num_multiprocessors)
        if one.is_stepwise:
            gpu_s = max(max(gpu_s, begin_s) + kernel_s, host_s)
        else:
            gpu_s = max(gpu_s, host_s + _LAUNCH_S) + kernel_s
        busy_s += kernel_s
        products_s += kernel_s if one.kernel.unit != "none" else 0.0
    # Later slices are started while the GPU still runs those before.
    slice_s = max(host_s, busy_s)
    host_s += (accumulation - 1) * host_s + (_STEP_US + _WEIGHT_US * traced.num_updated) * starting
    update_s = traced.update_bytes / (gpu.rates.bandwidth * 1e9 * _UPDATE_SHARE)
    total_s = max(gpu_s + (accumulation - 1) * slice_s, host_s) + update_s
    busy_s = busy_s * accumulation + update_s
    waiting = 1 - min(1.0, busy_s / total_s)
    bound = "Python" if waiting > _MOSTLY else "products" if 2 * products_s * accumulation > busy_s else "memory"
    return StepTime(total_s, _KERNEL_ERROR + (_PYTHON_ERROR - _KERNEL_ERROR) * min(1.0, 2 * waiting), bound)

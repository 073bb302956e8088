"""How long a step takes, from what its operators compute and move, and what the GPU can do.

Owns the counting of products and bytes while a step is traced, and the estimate of its time. Each operator takes as
long as its products or its memory traffic, whichever is longer; a step takes as long as its operators, or as long as
Python needs to start them, whichever is longer. Sums over many GPUs and loading of data are not covered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from jackline.memory.plan.gpus import GpuModel

Unit = Literal["half", "tf32", "single", "none"]  # which of the GPU's rates counts; none: only memory is moved

_VIEW_NAMES = """
    view _unsafe_view transpose permute t expand slice select unsqueeze squeeze detach alias as_strided split unbind
    chunk split_with_sizes diagonal unfold lift_fresh _reshape_alias view_as_real view_as_complex
"""
_VIEWS = frozenset(_VIEW_NAMES.split())
_FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# Microseconds that Python, autograd and the driver need to start an operator. Fitted to 142 steps on an H200 machine
# that waited for Python, on half of the models at a time: the other half was 9 % off (median), and 38 % at worst. In
# four sessions Python was between 0.8 and 1.2 times as fast as these numbers say. A loop on the CPU alone, timed for
# some milliseconds, did not tell how fast: with it the estimates were worse.
_VIEW_US = 12.0
_FORWARD_US = 44.0
_BACKWARD_US = 6.4  # of autograd's own thread, in C++
_FORWARDS_US = {"_to_copy": 20.0, "mm": 35.0, "addmm": 35.0, "bmm": 35.0, "baddbmm": 35.0}
_GROUPED_US = 600.0  # in float32 a product for each group, and a look at the offsets
_CUDNN_US = 45.0  # cuDNN looks for a kernel each time
_ATTENTION_US = 64.0  # with its checks and transposes
RECURRENT_US = 18.0  # of each step of each layer, one after the other
_WEIGHT_US = 8.0  # of an optimizer's Python for each weight
_STEP_US = 3600.0  # of a step besides: the batch, the loss, the optimizer
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Work:
    """One operator: multiply-adds count as two operations."""

    operations: int
    num_bytes: int
    unit: Unit
    start_us: float = _FORWARD_US  # until it is started
    name: str = ""
    is_backward: bool = False


@dataclass(frozen=True)
class Efficiency:
    """The share of the manufacturer's rates that real kernels reach. Fitted to the kernels of 35 steps on an H200.
    Three steps on the GPU itself say more."""

    half: float = 0.62
    tf32: float = 0.18
    single: float = 0.70
    memory: float = 0.46
    kernel_s: float = 6.0e-6
    error: float = 0.4


class Counter:
    """Collects the work of one slice while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.done: list[Work] = []
        self.num_views = 0

    def count(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if not self.is_on or name in _FREE:
            return
        if name in _VIEWS:
            self.num_views += 1
            return
        tensors = [*_tensors(args), *_tensors(result)]
        if tensors:
            operations, unit = operations_of(name, args, result)
            num_bytes = sum(_num_bytes(tensor) for tensor in tensors)
            self.done.append(Work(operations, num_bytes, unit, _start_us(name), name, is_backward()))

    def add(self, operations: int, tensors: Iterable[Tensor], start_us: float = _ATTENTION_US) -> None:
        """The work of a kernel that no operator of the trace stands for, such as fused attention."""
        if self.is_on:
            held = list(tensors)
            unit: Unit = "half" if held[0].dtype in _HALF else "single"
            num_bytes = sum(_num_bytes(tensor) for tensor in held)
            self.done.append(Work(operations, num_bytes, unit, start_us, "fused", is_backward()))


def _start_us(name: str) -> float:
    if "convolution" in name or "batch_norm" in name:
        return _CUDNN_US
    if name == "_grouped_mm":
        return _GROUPED_US
    return _BACKWARD_US if is_backward() else _FORWARDS_US.get(name, _FORWARD_US)


def is_backward() -> bool:
    """Autograd's thread has no gradients to track, unless it computes a part of the forward pass again."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def operations_of(name: str, args: tuple[Any, ...], result: Any) -> tuple[int, Unit]:
    if name in ("mm", "bmm", "_grouped_mm"):
        left = args[0]
        return 2 * result.numel() * _inner(left, args[1], result), _unit(left)
    if name in ("addmm", "baddbmm"):
        return 2 * result.numel() * args[1].shape[-1], _unit(args[1])
    if name == "convolution":
        return 2 * result.numel() * math.prod(args[1].shape[1:]), _unit(args[0], has_tf32=True)
    if name == "convolution_backward":
        wanted = sum(bool(one) for one in args[-1][:2])
        return 2 * wanted * args[0].numel() * math.prod(args[2].shape[1:]), _unit(args[0], has_tf32=True)
    return 0, "none"


def _inner(left: Tensor, right: Tensor, result: Tensor) -> int:
    if left.dim() == 2 and right.dim() == 2 and result.dim() == 3:  # a sum for each group of rows
        return max(1, left.shape[1] // result.shape[0])
    return left.shape[-1]


def _unit(value: Tensor, *, has_tf32: bool = False) -> Unit:
    if value.dtype in _HALF:
        return "half"
    return "tf32" if has_tf32 else "single"


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
    def num_views(self) -> int: ...
    @property
    def num_updated(self) -> int: ...
    @property
    def update_bytes(self) -> int: ...


def estimate(traced: Traced, gpu: GpuModel, accumulation: int = 1, how: Efficiency | None = None) -> StepTime:
    """The time of a step of `accumulation` slices."""
    how = how or Efficiency()
    rates = gpu.rates
    speed = {
        "half": rates.half * how.half * 1e12,
        "tf32": (rates.tf32 * how.tf32 or rates.single * how.single) * 1e12,
        "single": rates.single * how.single * 1e12,
        "none": math.inf,
    }
    bandwidth = rates.bandwidth * how.memory * 1e9
    products = moved = 0.0
    host = traced.num_views * _VIEW_US * 1e-6
    for one in traced.work:
        computing, moving = one.operations / speed[one.unit], one.num_bytes / bandwidth
        host += one.start_us * 1e-6
        if computing > moving:
            products += computing + how.kernel_s
        else:
            moved += max(moving, how.kernel_s)
    gpu_s = (products + moved) * accumulation + traced.update_bytes / bandwidth
    host_s = host * accumulation + (_STEP_US + _WEIGHT_US * traced.num_updated) * 1e-6
    bound = "Python" if host_s > gpu_s else "products" if products > moved else "memory"
    return StepTime(max(gpu_s, host_s), how.error, bound)

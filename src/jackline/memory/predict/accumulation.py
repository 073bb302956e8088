"""Sums of gradients inside backward: autograd adds into the first one where nobody else holds it.

Owns whether it would on the card. While a dispatch mode is active (and a trace is one) PyTorch never does, so a plain
trace has an allocation too many at every residual connection and for every weight that is used twice.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jackline.memory.predict.shortcuts import run_meta

_ADD = torch.ops.aten.add.Tensor


def is_summed_in_place(func: Any, args: tuple[Any, ...]) -> bool:
    """Call it in `__torch_dispatch__` itself: it looks at who called that, and counts references. A sum inside a
    derivative that PyTorch has in C++ cannot be told apart; there are hardly any."""
    if func is not _ADD or len(args) != 2 or not isinstance(args[1], Tensor):
        return False
    # A sum in Python code, such as one that is recomputed, has the frame of that code in between.
    if sys._getframe(2).f_code.co_name != "_engine_run_backward":
        return False
    first, second = args
    if first.layout != torch.strided or second.layout != torch.strided:
        return False
    if first.shape != second.shape or first.dtype != second.dtype or not _fills_its_storage(first):
        return False
    expected = references_of_one_holder()
    return expected is not None and _references(first) == expected


def _fills_its_storage(value: Tensor) -> bool:
    strides = zip(value.shape, value.stride(), strict=True)
    is_repeated = any(size > 1 and stride == 0 for size, stride in strides)
    return not is_repeated and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _references(value: Tensor) -> tuple[int, int]:
    """Holders of the tensor and of its storage, with those that the call itself adds."""
    storage = value.untyped_storage()
    return value._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees a sum of gradients of which the first is certainly held by autograd alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: tuple[int, int] | None = None  # what `_references` says of it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ADD:
            self.seen = _references(args[0])
        return run_meta(func, args, kwargs or {})


@functools.cache
def references_of_one_holder() -> tuple[int, int] | None:
    """Measured, because the call's own share differs between versions of PyTorch. None where it cannot be counted:
    then no sum is in place, and the prediction is a little too high. Call it once before any mode is active."""
    try:
        weight = torch.empty((1,), device="meta", requires_grad=True)
        with torch.inference_mode(False), torch.enable_grad(), _Counting() as counting:
            torch.autograd.grad(weight * weight, weight)
        seen: tuple[int, int] | None = counting.seen
    except (AttributeError, RuntimeError):
        return None
    return seen

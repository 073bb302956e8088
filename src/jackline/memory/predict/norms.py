"""RMSNorm as CUDA allocates it: one kernel that keeps its input and a number a row, shapes only.

Owns which tensors exist. On the meta device PyTorch takes it apart into squares, means and products, all of them in
float32 and two of them kept: a third of the memory of a model in bf16 that is not there on a card.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def has_fused_rms_norm() -> bool:
    """From the version on whose operator also gives what the way back needs, CUDA has a kernel for it (2.9)."""
    found = getattr(torch.ops.aten, "_fused_rms_norm", None)
    return found is not None and len(found.default._schema.returns) == 2


def rms_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func` is called itself where CUDA too would take it apart: no kernel, or weight and input of two types."""
    given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
    value, weight = given["input"], given.get("weight")
    is_mixed = weight is not None and weight.dtype != value.dtype
    if is_mixed or not has_fused_rms_norm() or not value.is_floating_point():
        return func(*args, **kwargs)
    return _RmsNorm.apply(value, weight, math.prod(given["normalized_shape"]))  # type: ignore[no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor | None, width: int) -> Tensor:
        value = value.contiguous()
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        scales = torch.empty(value.numel() // width, 1, dtype=torch.float32, device=value.device)
        ctx.save_for_backward(value, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        slopes = [
            torch.empty(part.shape, dtype=part.dtype, device=part.device) if part is not None else None
            for part in saved[:2]
        ]
        return *slopes, None

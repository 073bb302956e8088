"""Scaled dot-product attention as the CUDA kernels allocate it: shapes only, no values.

Owns which tensors flash (also cuDNN) and memory-efficient attention keep for the backward pass and what they need
for themselves inside it, which no tracer at the dispatcher can see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FLASH_MAX_HEAD = 256


def attend(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, has_flash: bool) -> Any:
    """`func` is the function the model called; it is called itself where CUDA too would take the plain road."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    query, key, value, mask = (given.get(name) for name in _NAMES[:4])
    assert isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    if query.dim() != 4 or (mask is not None and mask.requires_grad) or query.dtype == torch.float64:
        return func(*args, **kwargs)
    is_low = query.dtype in (torch.float16, torch.bfloat16)
    is_flash = has_flash and is_low and mask is None and query.shape[-1] == value.shape[-1] <= _FLASH_MAX_HEAD
    if is_flash and query.shape[-1] % 8:
        width = query.shape[-1]
        padded = [torch.nn.functional.pad(part, (0, -width % 8)) for part in (query, key, value)]
        return _Attention.apply(*padded, True)[..., :width]  # type: ignore[no-untyped-call]
    return _Attention.apply(query, key, value, is_flash)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_flash: bool) -> Tensor:
        batch, heads, length, _ = query.shape
        out = _like(value, batch, heads, length)
        rows = length if is_flash else _up(length, 32)
        log_sums = torch.empty((batch, heads, rows), dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        batch, heads, length, width = query.shape
        grads = tuple(_like(part, *part.shape[:3]) for part in (query, key, value))
        rows = _up(length, 128)
        row_sums = torch.empty((batch, heads, rows), dtype=torch.float32, device=query.device)
        if query.dtype != torch.float32:
            # The gradient of the query is summed in float32 and rounded at the end.
            sums = torch.empty((batch, rows, heads, _up(width, 32)), dtype=torch.float32, device=query.device)
            del sums
        del row_sums
        return *grads, None


def _like(part: Tensor, batch: int, heads: int, length: int) -> Tensor:
    """Laid out as (batch, length, heads, width), seen as (batch, heads, length, width)."""
    return torch.empty((batch, length, heads, part.shape[-1]), dtype=part.dtype, device=part.device).transpose(1, 2)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step

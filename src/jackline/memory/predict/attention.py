"""The allocations of the CUDA kernels for scaled dot-product attention: shapes only, no values.

Owns which tensors cuDNN, flash and memory-efficient attention keep for the backward pass, and the scratch memory they
take inside it, which no tracer at the dispatcher can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Fused = Literal["cudnn", "flash", "efficient"]
OnWork = Callable[..., None]  # (operations, the tensors that are read and written, us until it is started)
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FLASH_MAX_HEAD = 256
_CUDNN_MAX_HEAD = 128
_BIAS_STEP = 16
_TILE = 64  # rows, and columns, of a tile of the query's gradient in the memory-efficient kernel
_LOCK_BYTES = 16


def attend(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    fused: Fused,
    on_work: OnWork | None = None,
) -> Any:
    """`func` is the function the model called. It is called itself where CUDA would also use the unfused
    implementation. `fused` is the GPU's best kernel for half precision without a mask."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    query, key, value, mask = (given.get(name) for name in _NAMES[:4])
    assert isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    if query.dim() != 4 or query.dtype == torch.float64:
        return func(*args, **kwargs)
    chosen = _kernel(query, value, mask, fused)
    shares_heads = key.shape[1] != query.shape[1]
    is_unfused = mask is not None and mask.requires_grad
    if is_unfused or (shares_heads and (chosen == "efficient" or not given.get("enable_gqa"))):
        return _unfused(query, key, value, given) if given.get("dropout_p") else func(*args, **kwargs)
    fused = chosen
    if mask is not None:
        mask = _as_bias(mask, query, key, is_aligned=fused == "efficient")
    if fused != "efficient" and query.shape[-1] % 8:
        width = query.shape[-1]
        padded = [torch.nn.functional.pad(part, (0, -width % 8)) for part in (query, key, value)]
        return _Attention.apply(*padded, mask, _How("flash", on_work))[..., :width]  # type: ignore[no-untyped-call]
    how = _How(fused, on_work, bool(given.get("is_causal")))
    return _Attention.apply(query, key, value, mask, how)  # type: ignore[no-untyped-call]


def attend_flexibly(args: tuple[Any, ...], on_work: OnWork | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """FlexAttention as compiled programs run it: one kernel that keeps what flash attention keeps. (output, sums of
    the rows, their largest scores)"""
    query, key, value = args[:3]
    out = _Attention.apply(query, key, value, None, _How("flash", on_work))  # type: ignore[no-untyped-call]
    sums, largest = (_float32(query, *query.shape[:3]) for _ in range(2))
    return out, sums, largest


def _kernel(query: Tensor, value: Tensor, mask: Tensor | None, best: Fused) -> Fused:
    """The first of cuDNN, flash and the memory-efficient kernel that can do it, as PyTorch chooses."""
    is_low = query.dtype in (torch.float16, torch.bfloat16)
    widths = query.shape[-1], value.shape[-1]
    if not is_low:
        return "efficient"
    if best == "cudnn" and max(widths) <= _CUDNN_MAX_HEAD and not any(width % 8 for width in widths):
        return "cudnn"
    if mask is not None or best == "efficient" or not widths[0] == widths[1] <= _FLASH_MAX_HEAD:
        return "efficient"
    return "flash"


def _unfused(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Tensor:
    """The products and the softmax, in float32, as PyTorch does it where no kernel can. On the meta device its own
    implementation would make a dropout mask of 4 bytes an element, and CUDA's has one byte."""
    dtype = query.dtype
    query, key, value = (part.to(torch.float32) for part in (query, key, value))
    factor = (given.get("scale") or query.shape[-1] ** -0.5) ** 0.5
    mask = given.get("attn_mask")
    query = query * factor
    if given.get("is_causal"):
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask.logical_not(), -torch.inf, torch.zeros((), device=query.device))
    if given.get("enable_gqa"):
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    scores = torch.ops.aten._safe_softmax(scores, -1)
    kept = torch.native_dropout(scores, given["dropout_p"], True)[0]
    del scores
    return torch.matmul(kept, value).to(dtype)


def _as_bias(mask: Tensor, query: Tensor, key: Tensor, *, is_aligned: bool) -> Tensor:
    """A mask of truth values becomes one of numbers. The memory-efficient kernel wants rows of a multiple of 16; to
    pad them takes a copy for every head of every sample."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask.logical_not(), -torch.inf, torch.zeros((), dtype=query.dtype))
    shape = (*query.shape[:3], key.shape[2])
    if not is_aligned:
        return mask
    mask = mask.expand(shape)
    if shape[-1] % _BIAS_STEP:
        return torch.nn.functional.pad(mask, (0, -shape[-1] % _BIAS_STEP))[..., : shape[-1]]
    if any(stride % _BIAS_STEP for stride in mask.stride()[:3]):
        return mask.contiguous()
    return mask


@dataclass(frozen=True)
class _How:
    fused: Fused
    on_work: OnWork | None = None
    is_causal: bool = False


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: _How) -> Tensor:
        batch, heads, length, width = query.shape
        fused, ctx.on_work = how.fused, how.on_work
        ctx.operations = batch * heads * length * key.shape[2] * 2 * (width + value.shape[-1]) // (1 + how.is_causal)
        if fused == "efficient":
            out = _like(value, batch, heads, length)
        else:
            out = _laid_out_as(query, (batch, heads, length, value.shape[-1]))
        rows = _up(length, 32) if fused == "efficient" else length
        log_sums = _float32(query, batch, heads, rows)
        ctx.fused = fused
        ctx.save_for_backward(query, key, value, mask, out, log_sums)
        if ctx.on_work is not None:
            ctx.on_work(ctx.operations, (query, key, value, out))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # held to the end: nothing else holds tensors that were recomputed
        if ctx.fused == "efficient":
            grads = tuple(_like(part, *part.shape[:3]) for part in saved[:3])
        else:
            grads = tuple(_laid_out_as(part, tuple(part.shape)) for part in saved[:3])
        _BACKWARD[ctx.fused](saved[0])
        if ctx.on_work is not None:  # five products instead of two
            ctx.on_work(ctx.operations * 5 // 2, (*saved[:3], grad, *grads))
        return *grads, None, None


# The scratch memory of the backward kernels: allocated here and freed at once.


def _cudnn_backward(query: Tensor) -> None:
    """One allocation: the float32 sum of the query's gradient, which is rounded at the end; one sum for each row; and
    a few bytes more, which make it larger by one block of 512 bytes (seen at four shapes)."""
    batch, heads, length, width = query.shape
    _float32(query, batch * heads * length * (width + 1) + 1, 1)


def _flash_backward(query: Tensor) -> None:
    """The same as `_cudnn_backward` in two allocations, with rows and width rounded up."""
    batch, heads, length, width = query.shape
    rows = _up(length, 128)
    row_sums = _float32(query, batch, heads, rows)
    sums = _float32(query, batch, rows, heads, _up(width, 32))
    del sums, row_sums


def _efficient_backward(query: Tensor) -> None:
    """First the sum of gradient times output for each row, which the float32 kernel leaves to ordinary operators.
    Then the gradient of the query in tiles, each with its lock."""
    batch, heads, length, width = query.shape
    if query.dtype == torch.float32:
        products = _float32(query, batch, length, heads, width)
        sums = _float32(query, batch, length, heads)
        row_sums = _float32(query, batch, heads, length)
        del sums, products
    else:
        row_sums = _float32(query, batch, heads, length)
    num_tiles = batch * heads * -(-length // _TILE) * -(-width // _TILE)
    tiles = _float32(query, num_tiles, _TILE * _TILE + _LOCK_BYTES // 4)
    del row_sums, tiles


_BACKWARD: dict[Fused, Callable[[Tensor], None]] = {
    "cudnn": _cudnn_backward,
    "flash": _flash_backward,
    "efficient": _efficient_backward,
}


def _float32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _like(part: Tensor, batch: int, heads: int, length: int) -> Tensor:
    """A tensor laid out as (batch, length, heads, width) and viewed as (batch, heads, length, width)."""
    return torch.empty((batch, length, heads, part.shape[-1]), dtype=part.dtype, device=part.device).transpose(1, 2)


def _laid_out_as(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A dense tensor whose dimensions lie in memory in the same order as those of `part`. cuDNN and flash return such
    ones: whether a later `contiguous()` copies them depends on it."""
    strides = part.stride()
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    made = torch.empty([shape[dim] for dim in order], dtype=part.dtype, device=part.device)
    return made.permute([order.index(dim) for dim in range(len(shape))])


def _up(number: int, step: int) -> int:
    return -(-number // step) * step

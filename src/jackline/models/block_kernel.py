"""What stands between the matrix products of a GPT block, in as few passes over memory as there can be. Needs Triton.

Owns two operators with their gradients: `add_norm` (residual addition and LayerNorm) and `gelu` (bias and GELU). Both
backward passes also give the gradients of the biases of the linear layers around them, for which a compiler reads
each gradient a second time. Deterministic: sums of columns are made in two stages of fixed order, no atomics.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

# Of tiles: rows at once, loads in flight, warps; and how many programs share the rows of a backward pass. The best
# of 4 to 30 each for 32,768 rows of 768 on an H200 (bench/block_kernels.py).
NORM = {"tile": 1, "num_warps": 4}
NORM_BACK = {"tile": 1, "stages": 3, "num_warps": 2}
NORM_PARTS = 528
GELU = {"tile": 4, "columns": 512, "num_warps": 4}
GELU_BACK = {"tile": 8, "columns": 512, "stages": 3, "num_warps": 4}
GELU_PARTS = 512
_SUM_COLUMNS = 32


# Triton interprets annotations, so its functions have no others than Triton's own.
@triton.jit
def _add_norm(  # noqa: PLR0913
    stream, added, own, ahead, weight, bias, total, normed, means, scales, rows, width, eps,
    has_biases: tl.constexpr, tile: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.arange(0, block)
    is_row, is_column = row < rows, column < width
    inside = is_row[:, None] & is_column[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
    if has_biases:
        later = tl.load(ahead + column, mask=is_column, other=0.0).to(tl.float32)
        value += (tl.load(own + column, mask=is_column, other=0.0).to(tl.float32) + later)[None, :]
    low = value.to(total.dtype.element_ty)
    tl.store(total + at, low, mask=inside)
    value = low.to(tl.float32)  # as the backward pass reads it
    if has_biases:
        value -= later[None, :]
    mean = tl.sum(value, 1) / width
    value = tl.where(inside, value - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(means + row, mean, mask=is_row)
    tl.store(scales + row, scale, mask=is_row)
    gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    result = value * scale[:, None] * gain[None, :] + shift[None, :]
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_back(  # noqa: PLR0913
    from_total, from_normed, total, ahead, weight, means, scales, found, sums, rows, width, rows_each,
    has_biases: tl.constexpr, tile: tl.constexpr, stages: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    column = tl.arange(0, block)
    is_column = column < width
    gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    of_gain, of_shift = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    if has_biases:
        later = tl.load(ahead + column, mask=is_column, other=0.0).to(tl.float32)
        of_own, of_later = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
    for begin in tl.range(0, rows_each, tile, num_stages=stages):
        step = begin + tl.arange(0, tile)
        row = part * rows_each + step
        is_row = (row < rows) & (step < rows_each)
        inside = is_row[:, None] & is_column[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(from_normed + at, mask=inside, other=0.0).to(tl.float32)
        straight = tl.load(from_total + at, mask=inside, other=0.0).to(tl.float32)
        if has_biases:
            value -= later[None, :]
        scale = tl.load(scales + row, mask=is_row, other=0.0)
        value = (value - tl.load(means + row, mask=is_row, other=0.0)[:, None]) * scale[:, None]
        value = tl.where(inside, value, 0.0)
        of_gain += tl.sum(gradient * value, 0)
        of_shift += tl.sum(gradient, 0)
        gradient *= gain[None, :]
        along = tl.sum(gradient * value, 1) / width
        mean = tl.sum(gradient, 1) / width
        gradient = (gradient - mean[:, None] - value * along[:, None]) * scale[:, None] + straight
        tl.store(found + at, gradient.to(found.dtype.element_ty), mask=inside)
        if has_biases:
            of_own += tl.sum(tl.where(inside, gradient, 0.0), 0)
            of_later += tl.sum(straight, 0)
    sums += part.to(tl.int64) * (4 if has_biases else 2) * width + column
    tl.store(sums, of_gain, mask=is_column)
    tl.store(sums + width, of_shift, mask=is_column)
    if has_biases:
        tl.store(sums + 2 * width, of_own, mask=is_column)
        tl.store(sums + 3 * width, of_later, mask=is_column)


@triton.jit
def _gelu(before, bias, found, rows, width, tile: tl.constexpr, columns: tl.constexpr):  # noqa: PLR0913
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    value = tl.load(before + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
    # gelu(x) by tanh is x * sigmoid(2 u): one exponential instead of the library's tanh.
    double = value * (1.5957691216057308 + 0.07135481282052254 * value * value)
    tl.store(found + at, (value / (1.0 + tl.exp(-double))).to(found.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_back(  # noqa: PLR0913
    gradients, before, bias, found, sums, rows, width, rows_each,
    tile: tl.constexpr, columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < width
    shift = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    # As wide as a tile: summed over its rows in each round it would cost a barrier each time.
    of_shift = tl.zeros([tile, columns], tl.float32)
    for begin in tl.range(0, rows_each, tile, num_stages=stages):
        step = begin + tl.arange(0, tile)
        row = part * rows_each + step
        inside = ((row < rows) & (step < rows_each))[:, None] & is_column[None, :]
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        value = tl.load(before + at, mask=inside, other=0.0).to(tl.float32) + shift[None, :]
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
        square = value * value
        share = 1.0 / (1.0 + tl.exp(-value * (1.5957691216057308 + 0.07135481282052254 * square)))
        steep = value * (1.5957691216057308 + 0.21406443846156762 * square)
        gradient *= share + share * (1.0 - share) * steep
        tl.store(found + at, gradient.to(found.dtype.element_ty), mask=inside)
        of_shift += gradient
    tl.store(sums + part.to(tl.int64) * width + column, tl.sum(of_shift, 0), mask=is_column)


@triton.jit
def _sum_parts(sums, found, parts, width, tile: tl.constexpr, columns: tl.constexpr):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    total = tl.zeros([tile, columns], tl.float32)
    for begin in range(0, parts, tile):
        part = begin + tl.arange(0, tile)
        inside = (part < parts)[:, None] & (column < width)[None, :]
        total += tl.load(sums + part[:, None] * width + column[None, :], mask=inside, other=0.0)
    tl.store(found + column, tl.sum(total, 0).to(found.dtype.element_ty), mask=column < width)


def _summed(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The second stage: (parts, width) float32 to (width)."""
    parts, width = sums.shape
    found = torch.empty(width, dtype=dtype, device=sums.device)
    _sum_parts[(triton.cdiv(width, _SUM_COLUMNS),)](
        sums, found, parts, width, tile=32, columns=_SUM_COLUMNS, num_warps=4
    )
    return found


@custom_op("jackline::add_norm", mutates_args=())
def add_norm(  # noqa: PLR0913
    stream: Tensor,
    added: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    own: Tensor | None = None,
    ahead: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`stream + added`, its LayerNorm, and mean and scale of each row for the backward pass.

    With biases: `own` belongs to the layer that made `added`. `ahead` belongs to the layer whose result is added to
    the stream next; the stream takes it with it, the norm does not see it.
    """
    rows, width = stream.numel() // stream.shape[-1], stream.shape[-1]
    stream, added = stream.contiguous(), added.contiguous()
    total, normed = torch.empty_like(stream), torch.empty_like(stream)
    means, scales = (torch.empty(rows, dtype=torch.float32, device=stream.device) for _ in range(2))
    _add_norm[(triton.cdiv(rows, NORM["tile"]),)](
        stream, added, own, ahead, weight, bias, total, normed, means, scales, rows, width, eps,
        has_biases=own is not None, block=triton.next_power_of_2(width), **NORM,
    )  # fmt: skip
    return total, normed, means, scales


@add_norm.register_fake
def _(  # noqa: PLR0913
    stream: Tensor, added: Tensor, weight: Tensor, bias: Tensor, eps: float, own: Any = None, ahead: Any = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = stream.numel() // stream.shape[-1]
    row = stream.new_empty(rows, dtype=torch.float32)
    found = stream.new_empty(stream.shape)
    return found, torch.empty_like(found), row, torch.empty_like(row)


@custom_op("jackline::add_norm_back", mutates_args=())
def _go_back_from_norm(  # noqa: PLR0913
    from_total: Tensor,
    from_normed: Tensor,
    total: Tensor,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    ahead: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradient of `stream` and `added`; and those of weight, bias, own and ahead as rows of one matrix."""
    rows, width = total.numel() // total.shape[-1], total.shape[-1]
    from_total, from_normed, found = from_total.contiguous(), from_normed.contiguous(), torch.empty_like(total)
    parts = min(NORM_PARTS, rows)
    each = triton.cdiv(rows, parts)
    vectors = 2 if ahead is None else 4
    sums = torch.empty(parts, vectors * width, dtype=torch.float32, device=total.device)
    _add_norm_back[(parts,)](
        from_total, from_normed, total, ahead, weight, means, scales, found, sums, rows, width, each,
        has_biases=ahead is not None, block=triton.next_power_of_2(width), **NORM_BACK,
    )  # fmt: skip
    return found, _summed(sums, weight.dtype).view(vectors, width)


@_go_back_from_norm.register_fake
def _(  # noqa: PLR0913
    from_total: Tensor,
    from_normed: Tensor,
    total: Tensor,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    ahead: Any,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), weight.new_empty(2 if ahead is None else 4, total.shape[-1])


def _remember_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, _, _, own, ahead = inputs
    total, _, means, scales = output
    ctx.has_biases = own is not None
    ctx.save_for_backward(total, weight, means, scales, *([ahead] if own is not None else []))
    ctx.set_materialize_grads(False)


def _back_from_norm(ctx: Any, from_total: Any, from_normed: Any, *_unused: Any) -> tuple[Any, ...]:
    total, weight, means, scales, *ahead = ctx.saved_tensors
    from_total, from_normed = (torch.zeros_like(total) if one is None else one for one in (from_total, from_normed))
    found, vectors = torch.ops.jackline.add_norm_back(
        from_total, from_normed, total, weight, means, scales, ahead[0] if ctx.has_biases else None
    )
    biases = (vectors[2], vectors[3]) if ctx.has_biases else (None, None)
    return found, found, vectors[0], vectors[1], None, *biases


add_norm.register_autograd(_back_from_norm, setup_context=_remember_norm)


@custom_op("jackline::bias_gelu", mutates_args=())
def gelu(before: Tensor, bias: Tensor) -> Tensor:
    """`gelu(before + bias)` with tanh, as in GPT-2."""
    before = before.contiguous()
    found, width = torch.empty_like(before), before.shape[-1]
    rows = before.numel() // width
    _gelu[(triton.cdiv(rows, GELU["tile"]), triton.cdiv(width, GELU["columns"]))](
        before, bias, found, rows, width, **GELU
    )
    return found


@gelu.register_fake
def _(before: Tensor, bias: Tensor) -> Tensor:
    return before.new_empty(before.shape)


@custom_op("jackline::bias_gelu_back", mutates_args=())
def _go_back_from_gelu(gradient: Tensor, before: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    gradient, before = gradient.contiguous(), before.contiguous()
    found, width = torch.empty_like(before), before.shape[-1]
    rows = before.numel() // width
    parts = min(GELU_PARTS, rows)
    sums = torch.empty(parts, width, dtype=torch.float32, device=before.device)
    _gelu_back[(parts, triton.cdiv(width, GELU_BACK["columns"]))](
        gradient, before, bias, found, sums, rows, width, triton.cdiv(rows, parts), **GELU_BACK
    )
    return found, _summed(sums, bias.dtype)


@_go_back_from_gelu.register_fake
def _(gradient: Tensor, before: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return before.new_empty(before.shape), torch.empty_like(bias)


def _remember_gelu(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back_from_gelu(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.jackline.bias_gelu_back(gradient, *ctx.saved_tensors)
    return found


gelu.register_autograd(_back_from_gelu, setup_context=_remember_gelu)

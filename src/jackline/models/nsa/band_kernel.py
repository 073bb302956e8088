"""Attention over keys on a regular grid, within a band: the compressed and the window branch. Needs Triton.

Key i is at position i * stride + last, and query t reads it if 0 <= t - position < reach. With stride 1 and last 0
that is a sliding window; with the stride of the compressed blocks and their last token it is the compressed branch;
with an unlimited reach and stride 1 it is plain causal attention, where tiles before the edge are not masked.
Deterministic: no atomics. Queries that read nothing get zeros. Layout as in `reference`; all tensors contiguous.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913 - a kernel can take its inputs only as arguments
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

ENDLESS = 1 << 30
_LOG2_E = 1.4426950408889634
# Rows of queries, keys of a tile, warps, stages: for bf16 heads of 64 on a Hopper GPU (bench/nsa.py --tune).
TILES = {"forward": (128, 64, 8, 3), "queries": (64, 64, 4, 3), "keys": (64, 64, 4, 3)}
_WIDE_TILES = (32, 32, 4, 2)  # float32 needs twice the memory and is only for checking
_MANY_PROGRAMS = 512  # fewer leave parts of a large GPU idle
# How many queries one program of the key gradients goes through. Early compressed keys are read by all queries after
# them: at 64k tokens a program that took them all was still running when most of the GPU had nothing left to do.
_SPAN = 2048


# Triton interprets annotations, so its functions have no others than Triton's own.
@triton.jit
def _first_in_reach(query, stride: tl.constexpr, last: tl.constexpr, reach):
    """The first key that this query still reads."""
    before = query - reach - last
    return tl.where(before < 0, 0, before // stride + 1)


@triton.jit
def _count_until(query, stride: tl.constexpr, last: tl.constexpr):
    """How many keys are at or before this query."""
    return tl.where(query < last, 0, (query - last) // stride + 1)


@triton.jit
def _forward_part(mixed, largest, total, query, position, keys, values, begin, end, num_keys, row, scale, reach,
                  stride: tl.constexpr, last: tl.constexpr, is_edge: tl.constexpr,
                  tile: tl.constexpr, width: tl.constexpr):  # fmt: skip
    lane = tl.arange(0, width)
    for start in range(begin, end, tile):
        key = start + tl.arange(0, tile)
        there = key < num_keys
        k = tl.load(keys + key[None, :] * row + lane[:, None], mask=there[None, :], other=0.0)
        score = tl.dot(query, k, input_precision="ieee") * scale
        if is_edge:
            distance = position[:, None] - (key * stride + last)[None, :]
            score = tl.where((distance >= 0) & (distance < reach) & there[None, :], score, -float("inf"))
        most = tl.maximum(largest, tl.max(score, 1))
        safe = most
        if is_edge:
            safe = tl.where(most == -float("inf"), 0.0, most)  # nothing read so far: avoids -inf minus -inf
        share = tl.exp2(score - safe[:, None])
        fade = tl.exp2(largest - safe)
        total = total * fade + tl.sum(share, 1)
        v = tl.load(values + key[:, None] * row + lane[None, :], mask=there[:, None], other=0.0)
        mixed = tl.dot(share.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        largest = most
    return mixed, largest, total


@triton.jit
def _forward(queries, keys, values, out, logs, length, num_keys, scale, reach, heads: tl.constexpr,
             per_group: tl.constexpr, stride: tl.constexpr, last: tl.constexpr, is_endless: tl.constexpr,
             rows: tl.constexpr, tile: tl.constexpr, width: tl.constexpr):  # fmt: skip
    # The longest programs start first: late queries of the compressed branch read the most.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * rows
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    groups: tl.constexpr = heads // per_group
    position = first + tl.arange(0, rows)
    at = position[:, None] * (heads * width) + head * width + tl.arange(0, width)[None, :]
    base = batch * length * heads * width
    memory = batch * num_keys * groups * width + (head // per_group) * width
    query = tl.load(queries + base + at, mask=(position < length)[:, None], other=0.0)

    final = tl.minimum(first + rows, length) - 1
    begin = _first_in_reach(first, stride, last, reach) // tile * tile
    end = tl.minimum(_count_until(final, stride, last), num_keys)
    mixed, total = tl.zeros([rows, width], tl.float32), tl.zeros([rows], tl.float32)
    largest = tl.full([rows], -float("inf"), tl.float32)
    keys, values, row = keys + memory, values + memory, groups * width
    if is_endless:
        inner = _count_until(first, stride, last) // tile * tile
        mixed, largest, total = _forward_part(mixed, largest, total, query, position, keys, values, begin, inner,
                                              num_keys, row, scale, reach, stride, last, False, tile,
                                              width)  # fmt: skip
        begin = inner
    mixed, largest, total = _forward_part(mixed, largest, total, query, position, keys, values, begin, end, num_keys,
                                          row, scale, reach, stride, last, True, tile, width)  # fmt: skip
    has_read = total > 0
    mixed = mixed / tl.where(has_read, total, 1.0)[:, None]
    tl.store(out + base + at, mixed.to(out.dtype.element_ty), mask=(position < length)[:, None])
    # Infinite where nothing was read, so that every attention weight of the backward pass is zero.
    log = tl.where(has_read, largest + tl.log2(tl.where(has_read, total, 1.0)), float("inf"))
    tl.store(logs + (batch * heads + head) * length + position, log, mask=position < length)


@triton.jit
def _query_part(total, query, gradient, log, delta, position, keys, values, begin, end, num_keys, row, scale, reach,
                stride: tl.constexpr, last: tl.constexpr, is_edge: tl.constexpr,
                tile: tl.constexpr, width: tl.constexpr):  # fmt: skip
    lane = tl.arange(0, width)
    for start in range(begin, end, tile):
        key = start + tl.arange(0, tile)
        there = key < num_keys
        at = key[None, :] * row + lane[:, None]
        k = tl.load(keys + at, mask=there[None, :], other=0.0)
        score = tl.dot(query, k, input_precision="ieee") * scale
        if is_edge:
            distance = position[:, None] - (key * stride + last)[None, :]
            score = tl.where((distance >= 0) & (distance < reach) & there[None, :], score, -float("inf"))
        share = tl.exp2(score - log[:, None])
        v = tl.load(values + at, mask=there[None, :], other=0.0)
        change = share * (tl.dot(gradient, v, input_precision="ieee") - delta[:, None])
        total = tl.dot(change.to(k.dtype), tl.trans(k), total, input_precision="ieee")
    return total


@triton.jit
def _backward_query(queries, keys, values, gradients, logs, deltas, out, length, num_keys, scale, reach,
                    heads: tl.constexpr, per_group: tl.constexpr, stride: tl.constexpr, last: tl.constexpr,
                    is_endless: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr,
                    width: tl.constexpr):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * rows
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    groups: tl.constexpr = heads // per_group
    position = first + tl.arange(0, rows)
    inside = position < length
    at = position[:, None] * (heads * width) + head * width + tl.arange(0, width)[None, :]
    base = batch * length * heads * width
    memory = batch * num_keys * groups * width + (head // per_group) * width
    query = tl.load(queries + base + at, mask=inside[:, None], other=0.0)
    gradient = tl.load(gradients + base + at, mask=inside[:, None], other=0.0)
    line = (batch * heads + head) * length + position
    log = tl.load(logs + line, mask=inside, other=float("inf"))
    delta = tl.load(deltas + line, mask=inside, other=0.0)

    final = tl.minimum(first + rows, length) - 1
    begin = _first_in_reach(first, stride, last, reach) // tile * tile
    end = tl.minimum(_count_until(final, stride, last), num_keys)
    total = tl.zeros([rows, width], tl.float32)
    keys, values, row = keys + memory, values + memory, groups * width
    if is_endless:
        inner = _count_until(first, stride, last) // tile * tile
        total = _query_part(total, query, gradient, log, delta, position, keys, values, begin, inner, num_keys, row,
                            scale, reach, stride, last, False, tile, width)  # fmt: skip
        begin = inner
    total = _query_part(total, query, gradient, log, delta, position, keys, values, begin, end, num_keys, row,
                        scale, reach, stride, last, True, tile, width)  # fmt: skip
    total = total * (scale / 1.4426950408889634)
    tl.store(out + base + at, total.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _key_part(grad_k, grad_v, k, v, key, queries, gradients, logs, deltas, begin, end, length, row, scale, reach,
              stride: tl.constexpr, last: tl.constexpr, is_edge: tl.constexpr,
              rows: tl.constexpr, width: tl.constexpr):  # fmt: skip
    lane = tl.arange(0, width)
    for start in range(begin, end, rows):
        position = start + tl.arange(0, rows)
        inside = position < length
        at = position[:, None] * row + lane[None, :]
        query = tl.load(queries + at, mask=inside[:, None], other=0.0)
        score = tl.dot(k, tl.trans(query), input_precision="ieee") * scale
        if is_edge:
            distance = position[None, :] - (key * stride + last)[:, None]
            score = tl.where((distance >= 0) & (distance < reach), score, -float("inf"))
        log = tl.load(logs + position, mask=inside, other=float("inf"))
        share = tl.exp2(score - log[None, :])
        gradient = tl.load(gradients + at, mask=inside[:, None], other=0.0)
        grad_v = tl.dot(share.to(gradient.dtype), gradient, grad_v, input_precision="ieee")
        delta = tl.load(deltas + position, mask=inside, other=0.0)
        change = share * (tl.dot(v, tl.trans(gradient), input_precision="ieee") - delta[None, :])
        grad_k = tl.dot(change.to(query.dtype), query, grad_k, input_precision="ieee")
    return grad_k, grad_v


@triton.jit
def _backward_keys(queries, keys, values, gradients, logs, deltas, out_k, out_v, length, num_keys, scale, reach,
                   heads: tl.constexpr, per_group: tl.constexpr, at_once: tl.constexpr, stride: tl.constexpr,
                   last: tl.constexpr, is_endless: tl.constexpr, span: tl.constexpr, rows: tl.constexpr,
                   tile: tl.constexpr, width: tl.constexpr):  # fmt: skip
    """The gradients of one tile of keys from a span of the queries and `at_once` heads: a whole group, or one head
    where there are few programs. Neighbouring programs take the same span, so that its queries are read from the
    GPU's cache."""
    tiles = tl.cdiv(num_keys, tile)
    start, part = tl.program_id(0) % tiles * tile, tl.program_id(0) // tiles
    slot, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    groups: tl.constexpr = heads // per_group
    slots: tl.constexpr = heads // at_once
    key = start + tl.arange(0, tile)
    there = (key < num_keys)[:, None]
    lane = tl.arange(0, width)[None, :]
    group = slot * at_once // per_group
    at = (batch * num_keys + key[:, None]) * (groups * width) + group * width + lane
    k, v = tl.load(keys + at, mask=there, other=0.0), tl.load(values + at, mask=there, other=0.0)

    final = tl.minimum(start + tile, num_keys) - 1
    begin = (start * stride + last) // rows * rows
    end = tl.minimum(final * stride + last + reach, length)
    if is_endless:
        end = tl.minimum((part + 1) * span, length)
        begin = tl.maximum(begin, part * span)
    inner = end
    if is_endless:
        inner = tl.maximum(begin, tl.minimum(tl.cdiv(final * stride + last, rows) * rows, end))
    grad_k, grad_v = tl.zeros([tile, width], tl.float32), tl.zeros([tile, width], tl.float32)
    row = heads * width
    for number in range(at_once):
        head = slot * at_once + number
        base = batch * length * row + head * width
        line = (batch * heads + head) * length
        grad_k, grad_v = _key_part(grad_k, grad_v, k, v, key, queries + base, gradients + base, logs + line,
                                     deltas + line, begin, inner, length, row, scale, reach, stride, last, True,
                                     rows, width)  # fmt: skip
        if is_endless:
            grad_k, grad_v = _key_part(grad_k, grad_v, k, v, key, queries + base, gradients + base, logs + line,
                                         deltas + line, inner, end, length, row, scale, reach, stride, last, False,
                                         rows, width)  # fmt: skip
    grad_k = grad_k * (scale / 1.4426950408889634)
    to = ((part * tl.num_programs(2) + batch) * num_keys + key[:, None]) * (slots * width) + slot * width + lane
    tl.store(out_k + to, grad_k.to(out_k.dtype.element_ty), mask=there)
    tl.store(out_v + to, grad_v.to(out_v.dtype.element_ty), mask=there)


@triton.jit
def _row_products(out, gradients, deltas, count, length, heads: tl.constexpr, is_by_head: tl.constexpr,
                  rows: tl.constexpr, width: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = row[:, None] * width + tl.arange(0, width)[None, :]
    inside = row < count
    left = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    right = tl.load(gradients + at, mask=inside[:, None], other=0.0).to(tl.float32)
    to = row
    if is_by_head:
        token = row // heads
        to = (token // length * heads + row % heads) * length + token % length
    tl.store(deltas + to, tl.sum(left * right, 1), mask=inside)


def row_products(out: Tensor, gradients: Tensor, *, is_by_head: bool) -> Tensor:
    """The dot product of output and gradient for every row, as (batch, heads, length) or (batch, length, heads)."""
    batch, length, heads, width = out.shape
    sizes = (batch, heads, length) if is_by_head else (batch, length, heads)
    deltas = torch.empty(sizes, dtype=torch.float32, device=out.device)
    count, rows = batch * length * heads, 64
    _row_products[(triton.cdiv(count, rows),)](
        out, gradients, deltas, count, length, heads=heads, is_by_head=is_by_head, rows=rows, width=width
    )
    return deltas


def _sizes(query: Tensor, keys: Tensor) -> dict[str, Any]:
    heads, width = query.shape[2:]
    return {"heads": heads, "per_group": heads // keys.shape[2], "width": width}


def _tiles(kernel: str, query: Tensor) -> dict[str, int]:
    sizes = TILES[kernel] if query.dtype == torch.bfloat16 else _WIDE_TILES
    return dict(zip(("rows", "tile", "num_warps", "num_stages"), sizes, strict=True))


def _scale(query: Tensor) -> float:
    return float(query.shape[-1] ** -0.5 * _LOG2_E)


@custom_op("jackline::band_attention", mutates_args=())
def band_attention(
    query: Tensor, keys: Tensor, values: Tensor, stride: int, last: int, reach: int
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm (base 2) of each query's softmax sum, (batch, heads, length)."""
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    batch, length, heads, _ = query.shape
    out, logs = torch.empty_like(query), query.new_empty((batch, heads, length), dtype=torch.float32)
    tiles = _tiles("forward", query)
    _forward[(triton.cdiv(length, tiles["rows"]), heads, batch)](
        query, keys, values, out, logs, length, keys.shape[1], _scale(query), reach,
        stride=stride, last=last, is_endless=reach >= ENDLESS, **tiles, **_sizes(query, keys),
    )  # fmt: skip
    return out, logs


@custom_op("jackline::band_attention_back", mutates_args=())
def _band_back(
    tensors: list[Tensor], gradients: Tensor, stride: int, last: int, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, keys, values, out, logs = (part.contiguous() for part in tensors)
    gradients = gradients.contiguous()
    batch, length, heads, width = query.shape
    num_keys, groups = keys.shape[1:3]
    deltas = row_products(out, gradients, is_by_head=True)
    grad_q = torch.empty_like(query)
    shared = {"stride": stride, "last": last, "is_endless": reach >= ENDLESS, **_sizes(query, keys)}
    scale, sizes = _scale(query), _tiles("queries", query)
    _backward_query[(triton.cdiv(length, sizes["rows"]), heads, batch)](
        query, keys, values, gradients, logs, deltas, grad_q, length, num_keys, scale, reach, **shared, **sizes
    )  # fmt: skip
    if not num_keys:
        return grad_q, torch.zeros_like(keys), torch.zeros_like(values)
    sizes = _tiles("keys", query)
    tiles = triton.cdiv(num_keys, sizes["tile"])
    parts = triton.cdiv(length, _SPAN) if reach >= ENDLESS else 1
    slots = groups if parts * tiles * batch * groups >= _MANY_PROGRAMS else heads
    is_final = parts == 1 and slots == groups
    found = [
        torch.empty(
            (parts, batch, num_keys, slots, width),
            dtype=keys.dtype if is_final else torch.float32,
            device=keys.device,
        )
        for _ in range(2)
    ]
    _backward_keys[(parts * tiles, slots, batch)](
        query, keys, values, gradients, logs, deltas, *found, length, num_keys, scale, reach,
        at_once=heads // slots, span=_SPAN, **shared, **sizes,
    )  # fmt: skip
    if is_final:
        return grad_q, found[0][0], found[1][0]
    summed = [part.view(parts, batch, num_keys, groups, -1, width).sum(dim=(0, 4)).to(keys.dtype) for part in found]
    return grad_q, summed[0], summed[1]


@band_attention.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, stride: int, last: int, reach: int) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    return (
        query.new_empty(query.shape),
        query.new_empty((batch, heads, length), dtype=torch.float32),
    )


@_band_back.register_fake
def _(tensors: list[Tensor], gradients: Tensor, stride: int, last: int, reach: int) -> tuple[Tensor, Tensor, Tensor]:
    query, keys, values = (part.new_empty(part.shape) for part in tensors[:3])
    return query, keys, values


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.band = inputs[3:]
    ctx.set_materialize_grads(False)


def _go_back(ctx: Any, gradient: Tensor | None, _unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 6
    return (*_band_back(list(ctx.saved_tensors), gradient, *ctx.band), None, None, None)


band_attention.register_autograd(_go_back, setup_context=_remember)

"""Attention over selected blocks, block by block instead of query by query. Needs Triton.

A program takes one block of keys and a span of the queries that chose it. Its rows are (query, head) pairs of a whole
group, so tiles are full although a group has six heads, and a block is loaded once for hundreds of queries. A
query-by-query kernel reads 260 KB of keys for every query and group, 34 GB for 64k tokens. The cost is one partial
result per query and slot, combined afterwards: 25 KB a token for the 12 x 64 heads and 16 slots of m7c, allocated
only inside the operator. Deterministic: partial results are combined in a fixed order, no atomics.
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

from jackline.models.nsa.band_kernel import row_products

_LOG2_E = 1.4426950408889634
# Rows of (query, head) pairs, warps, stages: for bf16 heads of 64 on a Hopper GPU (bench/nsa.py --tune).
TILES = {"forward": (64, 4, 3), "backward": (128, 4, 2)}
_WIDE_TILES = (32, 4, 2)  # float32 needs twice the memory and is only for checking
_SPAN = 1024  # queries of one program


# A custom operator, although it is plain torch, so that a compiler does not change the sort.
@custom_op("jackline::plan_blocks", mutates_args=())
def plan_blocks(selection: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Which queries chose which block: per (batch, group) the entries query * slots + slot in the order of their
    blocks, and where each block's entries begin. It never waits for the device: all sizes follow from the shapes."""
    batch, groups, length, slots = selection.shape
    places, count = batch * groups, length * slots
    # One sort for all: the index of the (batch, group) is the higher part of the key. int16 takes half the passes.
    kind = torch.int16 if places * (num_blocks + 1) < 1 << 15 else torch.int32
    place = torch.arange(places, device=selection.device, dtype=torch.int32)[:, None]
    flat = selection.reshape(places, count)
    keys = torch.where(flat < 0, num_blocks, flat) + place * (num_blocks + 1)  # empty slots come last
    order = keys.flatten().to(kind).sort(stable=True)  # queries stay in order inside a block
    entries = (order.indices.view(places, count) - place * count).int()
    wanted = torch.arange(num_blocks + 1, device=selection.device, dtype=torch.int32) + place * (num_blocks + 1)
    begins = torch.searchsorted(order.values, wanted.to(kind), out_int32=True) - place * count
    return entries, begins


@plan_blocks.register_fake
def _(selection: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    batch, groups, length, slots = selection.shape
    sizes = (batch * groups, length * slots), (batch * groups, num_blocks + 1)
    return selection.new_empty(sizes[0], dtype=torch.int32), selection.new_empty(sizes[1], dtype=torch.int32)


def _spans(begins: Tensor, num_entries: int, span: int) -> tuple[Tensor, Tensor]:
    """The number of spans before each block, and the block of each span; -1 for spans that are not needed."""
    num_blocks = begins.shape[1] - 1
    counts = (begins.diff(dim=1) + span - 1) // span
    until = counts.cumsum(dim=1, dtype=torch.int32)
    most = num_entries // span + num_blocks
    number = torch.arange(most, device=begins.device, dtype=torch.int32).expand(begins.shape[0], -1).contiguous()
    owner = torch.searchsorted(until, number, right=True, out_int32=True)
    before = torch.cat((torch.zeros_like(until[:, :1]), until), dim=1)
    return before, torch.where(owner < num_blocks, owner, -1)


# Triton interprets annotations, so its functions have no others than Triton's own.
@triton.jit
def _forward(queries, keys, values, entries, begins, before, owners, partial, logs, length, num_blocks, scale,
             groups: tl.constexpr, per_group: tl.constexpr, slots: tl.constexpr, span: tl.constexpr,
             rows: tl.constexpr, tile: tl.constexpr, width: tl.constexpr):  # fmt: skip
    place = tl.program_id(1).to(tl.int64)
    block = tl.load(owners + place * tl.num_programs(0) + tl.program_id(0))
    if block >= 0:
        batch, group = place // groups, place % groups
        lane = tl.arange(0, width)
        key = block * tile + tl.arange(0, tile)
        at = (batch * length + key) * (groups * width) + group * width
        there = key < length
        k = tl.load(keys + at[None, :] + lane[:, None], mask=there[None, :], other=0.0)
        v = tl.load(values + at[:, None] + lane[None, :], mask=there[:, None], other=0.0)
        skipped = tl.program_id(0) - tl.load(before + place * (num_blocks + 1) + block)
        bounds = begins + place * (num_blocks + 1) + block
        first = tl.load(bounds) + skipped * span
        count = (tl.minimum(first + span, tl.load(bounds + 1)) - first) * per_group
        entries += place * length * slots + first
        heads: tl.constexpr = groups * per_group
        for start in range(0, count, rows):
            row = start + tl.arange(0, rows)
            inside = row < count
            entry = tl.load(entries + row // per_group, mask=inside, other=0)
            token, head = entry // slots, row % per_group
            line = (batch * length + token) * heads + group * per_group + head
            query = tl.load(queries + line[:, None] * width + lane[None, :], mask=inside[:, None], other=0.0)
            score = tl.dot(query, k, input_precision="ieee") * scale
            score = tl.where(key[None, :] <= token[:, None], score, -float("inf"))
            # Only queries at or after its first token choose a block, so there always is a token to read.
            most = tl.max(score, 1)
            most = tl.where(inside, most, 0.0)
            share = tl.exp2(score - most[:, None])
            total = tl.where(inside, tl.sum(share, 1), 1.0)
            mixed = tl.dot(share.to(v.dtype), v, input_precision="ieee") / total[:, None]
            to = (place * length * slots + entry) * per_group + head
            tl.store(partial + to[:, None] * width + lane[None, :], mixed.to(partial.dtype.element_ty),
                     mask=inside[:, None])  # fmt: skip
            tl.store(logs + to, most + tl.log2(total), mask=inside)


@triton.jit
def _fold(partial, logs, selection, out, sums, length, groups: tl.constexpr, per_group: tl.constexpr,
          slots: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):  # fmt: skip
    """The softmax over all slots of a query, from the softmax inside each slot."""
    place = tl.program_id(1).to(tl.int64)
    batch, group = place // groups, place % groups
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    token, head = row // per_group, row % per_group
    inside = token < length
    lane = tl.arange(0, width)[None, :]
    choice = selection + (place * length + token) * slots
    first = (place * length + token) * (slots * per_group) + head
    largest = tl.full([rows], -float("inf"), tl.float32)
    for slot in tl.static_range(slots):  # unrolled: all its reads are in flight at once
        used = inside & (tl.load(choice + slot, mask=inside, other=-1) >= 0)
        largest = tl.maximum(largest, tl.load(logs + first + slot * per_group, mask=used, other=-float("inf")))
    largest = tl.where(inside, largest, 0.0)
    mixed, total = tl.zeros([rows, width], tl.float32), tl.zeros([rows], tl.float32)
    for slot in tl.static_range(slots):
        used = inside & (tl.load(choice + slot, mask=inside, other=-1) >= 0)
        at = first + slot * per_group
        weight = tl.exp2(tl.load(logs + at, mask=used, other=-float("inf")) - largest)
        part = tl.load(partial + at[:, None] * width + lane, mask=used[:, None], other=0.0)
        mixed += part.to(tl.float32) * weight[:, None]
        total += weight
    total = tl.where(inside, total, 1.0)
    line = (batch * length + token) * (groups * per_group) + group * per_group + head
    mixed = mixed / total[:, None]
    tl.store(out + line[:, None] * width + lane, mixed.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(sums + line, largest + tl.log2(total), mask=inside)


@triton.jit
def _backward(queries, keys, values, gradients, sums, deltas, entries, begins, before, owners, partial, part_k,
              part_v, length, num_blocks, scale, groups: tl.constexpr, per_group: tl.constexpr, slots: tl.constexpr,
              span: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, width: tl.constexpr):  # fmt: skip
    place = tl.program_id(1).to(tl.int64)
    number = place * tl.num_programs(0) + tl.program_id(0)
    block = tl.load(owners + number)
    if block >= 0:
        batch, group = place // groups, place % groups
        lane = tl.arange(0, width)[None, :]
        key = block * tile + tl.arange(0, tile)
        at = ((batch * length + key) * (groups * width) + group * width)[:, None] + lane
        there = (key < length)[:, None]
        k, v = tl.load(keys + at, mask=there, other=0.0), tl.load(values + at, mask=there, other=0.0)
        skipped = tl.program_id(0) - tl.load(before + place * (num_blocks + 1) + block)
        bounds = begins + place * (num_blocks + 1) + block
        first = tl.load(bounds) + skipped * span
        count = (tl.minimum(first + span, tl.load(bounds + 1)) - first) * per_group
        entries += place * length * slots + first
        heads: tl.constexpr = groups * per_group
        grad_k, grad_v = tl.zeros([tile, width], tl.float32), tl.zeros([tile, width], tl.float32)
        for start in range(0, count, rows):
            row = start + tl.arange(0, rows)
            inside = row < count
            entry = tl.load(entries + row // per_group, mask=inside, other=0)
            token, head = entry // slots, row % per_group
            line = (batch * length + token) * heads + group * per_group + head
            query = tl.load(queries + line[:, None] * width + lane, mask=inside[:, None], other=0.0)
            gradient = tl.load(gradients + line[:, None] * width + lane, mask=inside[:, None], other=0.0)
            log = tl.load(sums + line, mask=inside, other=float("inf"))
            delta = tl.load(deltas + line, mask=inside, other=0.0)
            score = tl.dot(k, tl.trans(query), input_precision="ieee") * scale
            score = tl.where(key[:, None] <= token[None, :], score, -float("inf"))
            share = tl.exp2(score - log[None, :])
            grad_v = tl.dot(share.to(gradient.dtype), gradient, grad_v, input_precision="ieee")
            change = share * (tl.dot(v, tl.trans(gradient), input_precision="ieee") - delta[None, :])
            change = change.to(query.dtype)
            grad_k = tl.dot(change, query, grad_k, input_precision="ieee")
            grad_q = tl.dot(tl.trans(change), k, input_precision="ieee") * (scale / 1.4426950408889634)
            to = (place * length * slots + entry) * per_group + head
            tl.store(partial + to[:, None] * width + lane, grad_q.to(partial.dtype.element_ty),
                     mask=inside[:, None])  # fmt: skip
        to = number * (tile * width) + tl.arange(0, tile)[:, None] * width + lane
        tl.store(part_k + to, grad_k * (scale / 1.4426950408889634))
        tl.store(part_v + to, grad_v)


@triton.jit
def _add_slots(partial, selection, out, length, groups: tl.constexpr, per_group: tl.constexpr,
               slots: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):  # fmt: skip
    place = tl.program_id(1).to(tl.int64)
    batch, group = place // groups, place % groups
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    token, head = row // per_group, row % per_group
    inside = token < length
    lane = tl.arange(0, width)[None, :]
    first = (place * length + token) * (slots * per_group) + head
    total = tl.zeros([rows, width], tl.float32)
    for slot in tl.static_range(slots):
        used = inside & (tl.load(selection + (place * length + token) * slots + slot, mask=inside, other=-1) >= 0)
        at = first + slot * per_group
        total += tl.load(partial + at[:, None] * width + lane, mask=used[:, None], other=0.0).to(tl.float32)
    line = (batch * length + token) * (groups * per_group) + group * per_group + head
    tl.store(out + line[:, None] * width + lane, total.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _add_spans(part, before, out, length, num_spans, num_blocks, groups: tl.constexpr, tile: tl.constexpr,
               width: tl.constexpr):  # fmt: skip
    block, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, width)[None, :]
    inner = tl.arange(0, tile)
    total = tl.zeros([tile, width], tl.float32)
    bounds = before + place * (num_blocks + 1) + block
    for number in range(tl.load(bounds), tl.load(bounds + 1)):
        total += tl.load(part + (place * num_spans + number) * (tile * width) + inner[:, None] * width + lane)
    key = block * tile + inner
    to = ((place // groups * length + key) * (groups * width) + place % groups * width)[:, None] + lane
    tl.store(out + to, total.to(out.dtype.element_ty), mask=(key < length)[:, None])


def _sizes(query: Tensor, keys: Tensor, selection: Tensor) -> dict[str, Any]:
    groups = keys.shape[2]
    return {
        "groups": groups,
        "per_group": query.shape[2] // groups,
        "slots": selection.shape[3],
        "width": query.shape[3],
    }


def _tiles(kernel: str, query: Tensor) -> dict[str, int]:
    sizes = TILES[kernel] if query.dtype == torch.bfloat16 else _WIDE_TILES
    return dict(zip(("rows", "num_warps", "num_stages"), sizes, strict=True))


def _scale(query: Tensor) -> float:
    return float(query.shape[-1] ** -0.5 * _LOG2_E)


@custom_op("jackline::selected_attention", mutates_args=())
def _selected(
    query: Tensor, keys: Tensor, values: Tensor, choice: list[Tensor], block_length: int
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm (base 2) of each query's softmax sum, (batch, length, heads)."""
    query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    selection, entries, begins = choice
    batch, length, heads, width = query.shape
    places, slots = batch * keys.shape[2], selection.shape[3]
    before, owners = _spans(begins, length * slots, _SPAN)
    sizes = _sizes(query, keys, selection)
    partial = query.new_empty((places, length, slots, sizes["per_group"], width))
    logs = query.new_empty(partial.shape[:-1], dtype=torch.float32)
    _forward[(owners.shape[1], places)](
        query, keys, values, entries, begins, before, owners, partial, logs, length, begins.shape[1] - 1,
        _scale(query), span=_SPAN, tile=block_length, **sizes, **_tiles("forward", query),
    )  # fmt: skip
    out, sums = torch.empty_like(query), query.new_empty((batch, length, heads), dtype=torch.float32)
    rows = 64
    _fold[(triton.cdiv(length * sizes["per_group"], rows), places)](
        partial, logs, selection, out, sums, length, rows=rows, **sizes, num_warps=4
    )
    return out, sums


@custom_op("jackline::selected_attention_back", mutates_args=())
def _selected_back(
    tensors: list[Tensor], gradients: Tensor, choice: list[Tensor], block_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, keys, values, out, sums = (part.contiguous() for part in tensors)
    selection, entries, begins = choice
    gradients = gradients.contiguous()
    length, width = query.shape[1], query.shape[3]
    places, slots = query.shape[0] * keys.shape[2], selection.shape[3]
    before, owners = _spans(begins, length * slots, _SPAN)
    num_spans, num_blocks = owners.shape[1], begins.shape[1] - 1
    deltas = row_products(out, gradients, is_by_head=False)
    sizes = _sizes(query, keys, selection)
    partial = query.new_empty((places, length, slots, sizes["per_group"], width))
    parts = [query.new_empty((places, num_spans, block_length, width), dtype=torch.float32) for _ in range(2)]
    _backward[(num_spans, places)](
        query, keys, values, gradients, sums, deltas, entries, begins, before, owners, partial, *parts, length,
        num_blocks, _scale(query), span=_SPAN, tile=block_length, **sizes, **_tiles("backward", query),
    )  # fmt: skip
    grad_q, found = torch.empty_like(query), [torch.empty_like(keys), torch.empty_like(values)]
    rows = 64
    _add_slots[(triton.cdiv(length * sizes["per_group"], rows), places)](
        partial, selection, grad_q, length, rows=rows, **sizes, num_warps=4
    )
    for part, total in zip(parts, found, strict=True):
        _add_spans[(num_blocks, places)](
            part, before, total, length, num_spans, num_blocks, groups=sizes["groups"], tile=block_length,
            width=width, num_warps=4,
        )  # fmt: skip
    return grad_q, found[0], found[1]


@_selected.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, choice: list[Tensor], block_length: int) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@_selected_back.register_fake
def _(
    tensors: list[Tensor], gradients: Tensor, choice: list[Tensor], block_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, keys, values = (part.new_empty(part.shape) for part in tensors[:3])
    return query, keys, values


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, values, choice, ctx.block_length = inputs
    ctx.save_for_backward(query, keys, values, *output, *choice)
    ctx.set_materialize_grads(False)


def _go_back(ctx: Any, gradient: Tensor | None, _unused: Tensor | None) -> tuple[Any, ...]:
    if gradient is None:
        return None, None, None, [None] * 3, None
    saved = list(ctx.saved_tensors)
    return (*_selected_back(saved[:5], gradient, saved[5:], ctx.block_length), [None] * 3, None)


_selected.register_autograd(_go_back, setup_context=_remember)


def selected_attention(query: Tensor, keys: Tensor, values: Tensor, selection: Tensor, block_length: int) -> Tensor:
    """Exact attention over the blocks of `selection` (batch, groups, length, slots), up to each query itself."""
    selection = selection.contiguous()
    plan = plan_blocks(selection, -(-query.shape[1] // block_length))
    found: Tensor = _selected(query, keys, values, [selection, *plan], block_length)[0]
    return found

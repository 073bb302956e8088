"""Chooses the blocks a query reads, from the attention its group gave to compressed blocks. Needs Triton.

Scores exist for only a part of the queries at a time, so memory grows with the sequence and not with its square.
Nothing is kept for the backward pass, since a choice has no gradient. Ties go to the earlier block, as in
`blocks.pick_blocks`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: PLR0913 - a kernel can take its inputs only as arguments
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from jackline.models.nsa.shape import NSAShape

_LOG2_E = 1.4426950408889634
# Rows of queries, blocks of a tile, warps, stages: for bf16 heads of 64 on a Hopper GPU (bench/nsa.py --tune).
TILES = {"score": (64, 64, 4, 2)}
_WIDE_TILES = (32, 16, 4, 2)  # float32 needs twice the memory and is only for checking
_SCRATCH_FLOATS = 1 << 25  # 128 MiB of scores at a time


# Triton interprets annotations, so its functions have no others than Triton's own.
@triton.jit
def _score(queries, keys, logs, scores, length, begin, num_queries, num_keys, num_blocks, scale,
           heads: tl.constexpr, per_group: tl.constexpr, ratio: tl.constexpr, per_block: tl.constexpr,
           stride: tl.constexpr, block_length: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr,
           width: tl.constexpr):  # fmt: skip
    """One tile of queries and selection blocks: the attention weights of all compressed blocks inside, summed over
    the group.

    Each selection block overlaps `ratio + per_block - 1` compressed ones at fixed offsets. So each offset is one
    matrix product with every ratio-th key, and no weight has to cross from one tile into the next.
    """
    first, block_first = begin + tl.program_id(0) * rows, tl.program_id(1) * tile
    groups: tl.constexpr = heads // per_group
    batch, group = (tl.program_id(2) // groups).to(tl.int64), tl.program_id(2) % groups
    final = tl.minimum(first + rows, begin + num_queries) - 1
    if block_first * block_length <= final:
        position = first + tl.arange(0, rows)
        inside = position < begin + num_queries
        lane = tl.arange(0, width)
        block = block_first + tl.arange(0, tile)
        grid = keys + batch * num_keys * groups * width + group * width + lane[:, None]
        line = queries + (batch * length + position[:, None]) * (heads * width) + lane[None, :]
        log_line = logs + batch * heads * length + position
        total = tl.zeros([rows, tile], tl.float32)
        for offset in range(1 - per_block, ratio):
            key = block * ratio + offset
            there = (key >= 0) & (key < num_keys)
            k = tl.load(grid + key[None, :] * (groups * width), mask=there[None, :], other=0.0)
            share = tl.zeros([rows, tile], tl.float32)
            for head in range(group * per_group, (group + 1) * per_group):
                query = tl.load(line + head * width, mask=inside[:, None], other=0.0)
                log = tl.load(log_line + head * length, mask=inside, other=float("inf"))
                share += tl.exp2(tl.dot(query, k, input_precision="ieee") * scale - log[:, None])
            # Blocks after the query may have an infinite weight at this point; they are masked out here.
            seen = there[None, :] & (((key + per_block) * stride - 1)[None, :] <= position[:, None])
            overlap = tl.minimum(offset + per_block, ratio) - tl.maximum(offset, 0)
            total += tl.where(seen, share, 0.0) * (overlap.to(tl.float32) / per_block)
        place = tl.program_id(2).to(tl.int64) * num_queries + (position - begin)
        to = place[:, None] * num_blocks + block[None, :]
        tl.store(scores + to, total, mask=inside[:, None] & (block < num_blocks)[None, :])


@triton.jit
def _pick(scores, selection, length, begin, num_queries, num_blocks, block_length: tl.constexpr,
          slots: tl.constexpr, num_local: tl.constexpr, num_forced: tl.constexpr, rows: tl.constexpr,
          span: tl.constexpr, whole: tl.constexpr):  # fmt: skip
    """Pick the forced blocks, then the largest score repeatedly: a few passes over registers instead of a sort of a
    thousand scores.

    A score's lowest bits are replaced by the block's index (`blocks.blunt`). So the largest of plain integers is both
    the best score and, among equal scores, the first block: three times as fast as carrying the indices separately.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < num_queries
    own = (begin + row) // block_length
    block = tl.arange(0, span)[None, :]
    place = tl.program_id(1).to(tl.int64)
    to = selection + (place * length + begin + row) * slots
    for slot in range(num_forced):
        # Block 0, then the local blocks in order; the first queries have fewer of them and leave slots empty.
        near = tl.where(own < num_local, tl.where(slot <= own, slot, -1), own - num_local + slot)
        tl.store(to + slot, tl.where(slot == 0, 0, near), mask=inside)
    free = inside[:, None] & (block > 0) & (block <= own[:, None] - num_local)
    score = tl.load(scores + (place * num_queries + row[:, None]) * num_blocks + block, mask=free, other=0.0)
    score = tl.where(score > 0.0, score, 0.0)  # a NaN must not lead to a block that does not exist
    rank = (score.to(tl.int32, bitcast=True) & -whole) | (whole - 1 - block)
    rank = tl.where(free, rank, -1)
    for slot in range(num_forced, slots):
        best = tl.max(rank, 1)
        tl.store(to + slot, tl.where(best < 0, -1, whole - 1 - (best & (whole - 1))), mask=inside)
        rank = tl.where(rank == best[:, None], -1, rank)


@custom_op("jackline::choose_blocks", mutates_args=())
def _choose(query: Tensor, keys: Tensor, logs: Tensor, lengths: list[int]) -> Tensor:
    compressed_length, stride, block_length, slots, num_local = lengths
    query, keys, logs = query.contiguous(), keys.contiguous(), logs.contiguous()
    batch, length, heads, width = query.shape
    num_keys, groups = keys.shape[1:3]
    num_blocks = triton.cdiv(length, block_length)
    selection = query.new_empty((batch, groups, length, slots), dtype=torch.int32)
    piece = max(64, min(length, _SCRATCH_FLOATS // (batch * groups * num_blocks)))
    scores = query.new_empty((batch * groups, piece, num_blocks), dtype=torch.float32)
    rows, tile, warps, stages = TILES["score"] if query.dtype == torch.bfloat16 else _WIDE_TILES
    for begin in range(0, length, piece):
        count = min(piece, length - begin)
        # Blocks after the last query of this part are neither scored nor read.
        reached = triton.cdiv(begin + count, block_length)
        _score[(triton.cdiv(count, rows), triton.cdiv(reached, tile), batch * groups)](
            query, keys, logs, scores, length, begin, count, num_keys, num_blocks, float(width**-0.5 * _LOG2_E),
            heads=heads, per_group=heads // groups, ratio=block_length // stride,
            per_block=compressed_length // stride, stride=stride, block_length=block_length,
            rows=rows, tile=tile, width=width, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        span = triton.next_power_of_2(reached)
        picked_rows = max(1, 4096 // span)
        _pick[(triton.cdiv(count, picked_rows), batch * groups)](
            scores, selection, length, begin, count, num_blocks, block_length=block_length, slots=slots,
            num_local=num_local, num_forced=min(slots, num_local + 1), rows=picked_rows, span=span,
            whole=triton.next_power_of_2(num_blocks), num_warps=4,
        )  # fmt: skip
    return selection


@_choose.register_fake
def _(query: Tensor, keys: Tensor, logs: Tensor, lengths: list[int]) -> Tensor:
    batch, length = query.shape[:2]
    return query.new_empty((batch, keys.shape[2], length, lengths[3]), dtype=torch.int32)


def choose_blocks(query: Tensor, keys: Tensor, logs: Tensor, shape: NSAShape) -> Tensor:
    """(batch, groups, length, slots) from compressed keys and the logarithms `band_attention` gave for them."""
    slots = min(shape.num_blocks, shape.num_selectable(query.shape[1]))
    lengths = [shape.compressed_length, shape.compressed_stride, shape.block_length, slots, shape.num_local]
    found: Tensor = _choose(query.detach(), keys.detach(), logs.detach(), lengths)
    return found

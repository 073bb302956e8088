"""Which keys a query may read, and which blocks it chooses: the index arithmetic of sparse attention, in plain torch.

A query sees a compressed block only if it sees the block's last token. A block that reaches past the query would leak
tokens that the query must predict, and a softmax over such blocks would leak them into the selection. Positions are
those in the sequence, never those in a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jackline.models.nsa.shape import NSAShape


def compress(tokens: Tensor, shape: NSAShape) -> Tensor:
    """Averages of overlapping blocks of (batch, length, ...) along the length. An incomplete last block is left out.

    Each piece of one stride is averaged once and shared by the blocks over it.
    """
    stride, count = shape.compressed_stride, shape.num_compressed(tokens.shape[1])
    per_block = shape.compressed_length // stride
    if not count:
        return tokens[:, :0]
    num_pieces = count + per_block - 1
    whole = tokens[:, : num_pieces * stride]
    pieces = whole.reshape(tokens.shape[0], num_pieces, stride, *tokens.shape[2:]).mean(dim=2)
    total = pieces[:, :count]
    for number in range(1, per_block):
        total = total + pieces[:, number : number + count]
    return total / per_block


def visible_compressed(length: int, shape: NSAShape, device: torch.device) -> Tensor:
    """(length, compressed) true where the whole block is at or before the query."""
    query = torch.arange(length, device=device)
    last = torch.arange(shape.num_compressed(length), device=device) * shape.compressed_stride
    return last + (shape.compressed_length - 1) <= query[:, None]


def visible_in_window(length: int, window: int, device: torch.device) -> Tensor:
    """(length, length) true for the query itself and the window - 1 tokens before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < window)


def visible_in_blocks(selection: Tensor, length: int, block_length: int) -> Tensor:
    """(..., length, length) true for the tokens of a query's selected blocks that are not after it."""
    count = -(-length // block_length)
    # One extra column for the -1 of empty slots.
    chosen = torch.zeros(*selection.shape[:-1], count + 1, dtype=torch.bool, device=selection.device)
    chosen.scatter_(-1, selection.long() % (count + 1), True)
    tokens = chosen[..., :count].repeat_interleave(block_length, dim=-1)[..., :length]
    return tokens & visible_in_window(length, length, selection.device)


def overlap_weights(shape: NSAShape) -> list[tuple[int, float]]:
    """(offset, weight): selection block j takes this share of the score of compressed block j * ratio + offset.

    The same for every block, so a kernel needs no matrix. All shares of one compressed block sum to one.
    """
    ratio = shape.block_length // shape.compressed_stride
    per_block = shape.compressed_length // shape.compressed_stride
    offsets = range(1 - per_block, ratio)
    return [(at, (min(at + per_block, ratio) - max(at, 0)) / per_block) for at in offsets]


def to_block_scores(shares: Tensor, length: int, shape: NSAShape) -> Tensor:
    """Scores (..., blocks) from the attention that compressed blocks (..., compressed) got. Each compressed block
    gives a selection block the share that overlaps it."""
    begin = (torch.arange(shares.shape[-1], device=shares.device) * shape.compressed_stride)[:, None]
    block = torch.arange(shape.num_selectable(length), device=shares.device) * shape.block_length
    common = torch.minimum(begin + shape.compressed_length, block + shape.block_length) - torch.maximum(begin, block)
    return shares @ (common.clamp(min=0) / shape.compressed_length).to(shares.dtype)


def blunt(scores: Tensor) -> Tensor:
    """Scores (..., blocks) in float32 with their lowest bits cleared: as many bits as a block's index needs.

    A kernel stores the index in those bits. With 1,024 blocks (64k tokens) 13 bits of the score remain: scores closer
    than one part in 8,192 count as equal. The bf16 keys and queries behind them have only 8 bits.
    """
    lowest = (1 << (scores.shape[-1] - 1).bit_length()) - 1
    return (scores.float().contiguous().view(torch.int32) & ~lowest).view(torch.float32)


def pick_blocks(scores: Tensor, shape: NSAShape) -> Tensor:
    """The blocks (..., length, slots) that each query reads, from scores (..., length, blocks); -1 for an empty slot.

    Block 0 and the local ones come first whatever their score. Ties go to the earlier block: a stable sort does that
    without a bias added to the scores.
    """
    length, num_blocks = scores.shape[-2:]
    scores = blunt(scores)
    own = (torch.arange(length, device=scores.device) // shape.block_length)[:, None]
    block = torch.arange(num_blocks, device=scores.device)
    is_forced = (block == 0) | ((block <= own) & (block > own - shape.num_local))
    ranked = scores.masked_fill(is_forced, float("inf")).masked_fill(block > own, -float("inf"))
    best = ranked.sort(dim=-1, descending=True, stable=True)
    slots = min(shape.num_blocks, num_blocks)
    picked = best.indices[..., :slots].int()
    return picked.masked_fill(best.values[..., :slots] == -float("inf"), -1)


def every_block(batch: int, length: int, shape: NSAShape, device: torch.device) -> Tensor:
    """What `pick_blocks` gives where every block is selected, without scores: (batch, groups, length, slots)."""
    block = torch.arange(shape.num_selectable(length), device=device, dtype=torch.int32)
    own = (torch.arange(length, device=device) // shape.block_length)[:, None]
    picked = block.expand(length, -1).masked_fill(block > own, -1)
    return picked.expand(batch, shape.num_groups, -1, -1)

"""Sparse attention as the paper describes it: every branch is a masked softmax. Any device, any float dtype.

Its memory grows with the square of the sequence. It is the reference for the kernels, and machines without them use
it. Layout: queries (batch, length, heads, width), keys and values (batch, length, groups, width).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jackline.models.nsa import blocks
from jackline.models.nsa.shape import NSAShape


class Memory(NamedTuple):
    """Keys and values, one pair for each branch; the keys already have their rotary positions."""

    compressed_keys: Tensor
    compressed_values: Tensor
    selected_keys: Tensor
    selected_values: Tensor
    window_keys: Tensor
    window_values: Tensor


class Branches(NamedTuple):
    """What each branch read, (batch, length, heads, width), and the blocks chosen, (batch, groups, length, slots)."""

    compressed: Tensor
    selected: Tensor
    window: Tensor
    selection: Tensor


def attend(query: Tensor, memory: Memory, shape: NSAShape, selection: Tensor | None = None) -> Branches:
    """All three branches. With a `selection` no blocks are chosen, for a comparison that rounding cannot disturb."""
    if query.device.type == "meta":  # traced for its memory; that device has no autocast to switch off
        return _attend(query, memory, shape, selection)
    with torch.autocast(query.device.type, enabled=False):  # autocast would compute scores in bf16 and so make ties
        return _attend(query, memory, shape, selection)


def _attend(query: Tensor, memory: Memory, shape: NSAShape, selection: Tensor | None) -> Branches:
    length, device = query.shape[1], query.device
    keys, values = (blocks.compress(part, shape) for part in memory[:2])
    seen = blocks.visible_compressed(length, shape, device)
    compressed, shares = masked_attention(query, keys, values, seen)
    # The heads of a group choose together, so that a kernel loads a block once for all of them.
    scores = blocks.to_block_scores(shares.detach().sum(dim=2), length, shape)
    selection = blocks.pick_blocks(scores, shape) if selection is None else selection
    chosen = blocks.visible_in_blocks(selection, length, shape.block_length)
    selected, _ = masked_attention(query, memory.selected_keys, memory.selected_values, chosen[:, :, None])
    near = blocks.visible_in_window(length, shape.window, device)
    window, _ = masked_attention(query, memory.window_keys, memory.window_values, near)
    return Branches(compressed, selected, window, selection)


def masked_attention(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The output, shaped like `query`, and the attention weights (batch, groups, heads of a group, length, keys).

    A query that sees nothing gets zeros: a softmax over nothing would be NaN, forward and backward.
    """
    batch, length, heads, width = query.shape
    groups = keys.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(batch, length, groups, heads // groups, width).to(wide)
    scores = torch.einsum("btghd,bngd->bghtn", grouped, keys.to(wide)) * width**-0.5
    hidden = scores.masked_fill(~visible, torch.finfo(wide).min)
    shares = torch.softmax(hidden, dim=-1) * visible
    mixed = torch.einsum("bghtn,bngd->btghd", shares, values.to(wide))
    return mixed.flatten(2, 3).to(query.dtype), shares

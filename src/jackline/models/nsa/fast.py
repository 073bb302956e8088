"""The three branches computed by kernels: memory grows with the sequence, not with its square. Needs Triton.

It gives the same results as `reference.attend`, up to rounding. A score that rounds differently may select another
block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jackline.models.nsa import blocks
from jackline.models.nsa.band_kernel import ENDLESS, band_attention
from jackline.models.nsa.choice_kernel import choose_blocks
from jackline.models.nsa.reference import Branches, Memory
from jackline.models.nsa.selected_kernel import selected_attention
from jackline.models.nsa.shape import NSAShape


def attend(query: Tensor, memory: Memory, shape: NSAShape) -> Branches:
    memory = Memory(*(part.to(query.dtype) for part in memory))
    length = query.shape[1]
    keys, values = (blocks.compress(part, shape) for part in memory[:2])
    compressed, logs = torch.zeros_like(query), None
    if shape.num_compressed(length):
        band = (shape.compressed_stride, shape.compressed_length - 1, ENDLESS)
        compressed, logs = band_attention(query, keys, values, *band)
    window, _ = band_attention(query, memory.window_keys, memory.window_values, 1, 0, shape.window)
    if logs is None or length <= shape.reads_everything_up_to:
        # Every block is selected: this is plain causal attention, and the tokens are read without the selection.
        selection = blocks.every_block(query.shape[0], length, shape, query.device)
        selected, _ = band_attention(query, memory.selected_keys, memory.selected_values, 1, 0, ENDLESS)
        return Branches(compressed, selected, window, selection)
    selection = choose_blocks(query, keys, logs, shape)
    selected = selected_attention(query, memory.selected_keys, memory.selected_values, selection, shape.block_length)
    return Branches(compressed, selected, window, selection)

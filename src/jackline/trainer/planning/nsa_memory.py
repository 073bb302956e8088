"""Sparse attention as the memory plan sees it: what its kernels keep and take, without the kernels.

A plan is made on machines without Triton, so the operators themselves cannot be traced there. Each branch keeps what
a flash attention keeps (queries, keys, values, output, one number a row), and that the plan knows. The choice of
blocks and the partial results of the selected branch come on top. What a rehearsal measures corrects the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from jackline.models.nsa import blocks
from jackline.models.nsa.attention import SparseAttention
from jackline.models.nsa.model import NSAModel, SparseBlock
from jackline.models.nsa.reference import Branches, Memory
from jackline.models.nsa.shape import NSAShape


def make_planned(shape: Any, *, is_recomputing: bool, loss_chunk_rows: int) -> NSAModel:
    """The model with stand-ins for its kernels; its values mean nothing."""
    assert isinstance(shape, NSAShape)
    model = NSAModel(shape, is_recomputing=is_recomputing, loss_chunk_rows=loss_chunk_rows)
    for block in model.blocks:
        assert isinstance(block, SparseBlock)
        block.attention = PlannedAttention(shape)
    return model


class PlannedAttention(SparseAttention):
    def _turn(self, query: Tensor, projected: Tensor) -> tuple[Tensor, Memory]:
        groups, width = self.shape.num_groups, self.shape.head_width
        parts = projected.view(*projected.shape[:2], 6, groups, width).unbind(dim=2)
        turned = [part if number % 2 else _turned(part) for number, part in enumerate(parts)]
        return _turned(query), Memory(*turned)

    def _read(self, query: Tensor, memory: Memory) -> Branches:
        memory = Memory(*(part.to(query.dtype) for part in memory))
        length, shape = query.shape[1], self.shape
        keys, values = (blocks.compress(part, shape) for part in memory[:2])
        compressed = _attend(query, keys, values) if shape.num_compressed(length) else torch.zeros_like(query)
        window = _attend(query, memory.window_keys, memory.window_values)
        selection = blocks.every_block(query.shape[0], length, shape, query.device)
        selected = _attend(query, memory.selected_keys, memory.selected_values)
        if length > shape.reads_everything_up_to:
            selection = selection[..., : shape.num_blocks].contiguous()
            selected = _Partial.apply(selected, selection)  # type: ignore[no-untyped-call]
        return Branches(compressed, selected, window, selection)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
    return functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True).transpose(1, 2)


def _turned(heads: Tensor) -> Tensor:
    found: Tensor = _Turned.apply(heads)  # type: ignore[no-untyped-call]
    return found


class _Turned(torch.autograd.Function):
    """A turn keeps nothing for the way back but its angles. Its twenty small operators, each way and in every layer,
    were a third of the time of a plan."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor) -> Tensor:
        return heads.new_empty(heads.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.new_empty(gradient.shape)


class _Partial(torch.autograd.Function):
    """One partial result for each query and slot, alive only inside the operator, and the plan of blocks kept."""

    @staticmethod
    def forward(ctx: Any, selected: Tensor, selection: Tensor) -> Tensor:
        ctx.save_for_backward(selection, torch.empty_like(selection))
        ctx.slots = selection.shape[-1]
        partial = selected.new_empty((ctx.slots, *selected.shape))
        del partial
        return selected.view_as(selected)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        partial = gradient.new_empty((ctx.slots, *gradient.shape))
        del partial
        return gradient, None

"""The attention module: projections, rotary positions, three branches and the gate that mixes them.

Kernels compute the branches where `model.why_no_kernels` has no objection, plain torch elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.models.nsa import reference
from jackline.models.nsa.reference import Branches, Memory
from jackline.models.nsa.shape import NSAShape

BRANCHES = ("compressed", "selected", "window")
_GATE_GAIN = 0.1  # small, so that at the start of training each branch gets a third


class SparseAttention(nn.Module):
    """(batch, length, width) to the same shape. Each position reads only itself and the positions before it."""

    def __init__(self, shape: NSAShape) -> None:
        super().__init__()
        self.shape = shape
        self.has_kernels = False  # set by a caller that has checked `model.why_no_kernels`, before compiling
        heads = shape.num_heads * shape.head_width
        self.query = nn.Linear(shape.width, heads, bias=False)
        self.memory = nn.Linear(shape.width, 6 * shape.num_groups * shape.head_width, bias=False)
        self.gate_in = nn.Linear(shape.head_width, shape.head_width // 2)
        self.gate_out = nn.Linear(shape.head_width // 2, len(BRANCHES))
        self.projection = nn.Linear(heads, shape.width, bias=False)
        self.initialise_gate()

    def initialise_gate(self) -> None:
        for layer in (self.gate_in, self.gate_out):
            nn.init.xavier_uniform_(layer.weight, gain=_GATE_GAIN)
            nn.init.zeros_(layer.bias)

    def forward(self, normed: Tensor) -> Tensor:
        return self.attend(normed)[0]

    def attend(self, normed: Tensor) -> tuple[Tensor, Tensor, Branches]:
        """The output, the gates (batch, length, groups, 3) and the branches, for callers that need statistics."""
        batch, length, _ = normed.shape
        query = self.query(normed).view(batch, length, self.shape.num_heads, self.shape.head_width)
        gates = self._gates(query)
        turned, memory = self._turn(query, self.memory(normed))
        found = self._read(turned, memory)
        parts = (found.compressed, found.selected, found.window)
        # Each gate belongs to a group of heads; the heads of a group are adjacent.
        spread = gates.repeat_interleave(self.shape.heads_per_group, dim=2)
        mixed = sum(spread[..., number, None] * part for number, part in enumerate(parts))
        assert isinstance(mixed, Tensor)
        output: Tensor = self.projection(mixed.to(normed.dtype).flatten(2))
        return output, gates, found

    def _read(self, query: Tensor, memory: Memory) -> Branches:
        if self.has_kernels:
            from jackline.models.nsa import fast

            return fast.attend(query, memory, self.shape)
        return reference.attend(query, memory, self.shape)

    def _gates(self, query: Tensor) -> Tensor:
        # From the query before the rotation: the gates of a token should not depend on its position in the sequence.
        grouped = (*query.shape[:2], self.shape.num_groups, self.shape.heads_per_group, self.shape.head_width)
        mean = query.view(grouped).mean(dim=3)
        hidden = functional.silu(self.gate_in(mean))
        return torch.softmax(self.gate_out(hidden).float(), dim=-1).to(query.dtype)

    def _turn(self, query: Tensor, projected: Tensor) -> tuple[Tensor, Memory]:
        groups, width = self.shape.num_groups, self.shape.head_width
        parts = projected.view(*projected.shape[:2], 6, groups, width).unbind(dim=2)
        turns = rotary_turns(query.shape[1], width, self.shape.rotary_base, query.device)
        # Keys have even indices, values odd ones. Only queries and keys are rotated, each head by itself.
        turned = [part if number % 2 else rotate(part, turns) for number, part in enumerate(parts)]
        return rotate(query, turns), Memory(*turned)


def rotary_turns(length: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine (length, 1, width / 2), in float32: bf16 cannot tell position 257 from 256."""
    speed = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * speed
    return angle.cos()[:, None], angle.sin()[:, None]


def rotate(heads: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate (batch, length, heads, width) by the positions; the first half of the width pairs with the second."""
    cosine, sine = turns
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(heads.dtype)

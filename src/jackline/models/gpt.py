"""A language model of the shape of GPT-2: pre-norm blocks, learned positions, causal attention by SDPA.

Owns the module and its initialisation. `stack` owns the way through it, `shapes` the named sizes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.models import unfilled
from jackline.models.embedding import embed
from jackline.models.shapes import GPTShape
from jackline.models.stack import Stack

_INIT_STD = 0.02


def _gelu(hidden: Tensor) -> Tensor:
    return functional.gelu(hidden, approximate="tanh")  # as in GPT-2


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.dropout = shape.dropout
        self.activation = functional.relu if shape.activation == "relu" else _gelu
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = unfilled.Linear(width, 3 * width)
        self.projection = unfilled.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = unfilled.Linear(width, shape.mlp_width)
        self.down = unfilled.Linear(shape.mlp_width, width)

    def forward(self, stream: Tensor, visible: Tensor | None = None) -> Tensor:
        """`visible`: which tokens each one reads; None: all before it."""
        stream, added = self.split(stream, visible)
        return stream + added

    def split(self, stream: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The result before the last addition."""
        stream = stream + self._drop(self._attend(self.attention_norm(stream), visible))
        hidden: Tensor = self.activation(self.up(self.mlp_norm(stream)))
        return stream, self._drop(self.down(hidden))

    def _attend(self, normed: Tensor, visible: Tensor | None) -> Tensor:
        batch, length, width = normed.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        query, key, value = (part.view(heads).transpose(1, 2) for part in self.qkv(normed).split(width, dim=2))
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            is_causal=visible is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        projected: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected

    def _drop(self, branch: Tensor) -> Tensor:
        # Not called at 0: dropout(p=0) would still draw from the RNG on some devices.
        return functional.dropout(branch, self.dropout, self.training) if self.dropout else branch


def _make_head(shape: GPTShape, tokens: nn.Embedding) -> nn.Linear:
    if not shape.is_tied:
        return unfilled.Linear(shape.width, shape.vocab_size, bias=shape.has_head_bias)
    # On the meta device first: a matrix of 150 MB that is thrown away at once would leave a hole in the GPU's memory.
    head = unfilled.Linear(shape.width, shape.vocab_size, bias=False, device="meta")
    head.weight = tokens.weight
    if shape.has_head_bias:
        head.bias = nn.Parameter(torch.zeros(shape.vocab_size))
    return head


class GPT(Stack):
    """GPT-2, called as every `Stack` is."""

    norm: nn.LayerNorm

    def __init__(self, shape: GPTShape, *, is_recomputing: bool = False, loss_chunk_rows: int = 0) -> None:
        super().__init__(is_recomputing=is_recomputing, loss_chunk_rows=loss_chunk_rows)
        self.shape = shape
        self.separator: int | None = None  # the token before each document, if none reads the document before it
        self.tokens = unfilled.Embedding(shape.vocab_size, shape.width)
        self.positions = unfilled.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = _make_head(shape, self.tokens)
        self._initialise()

    def _initialise(self) -> None:
        """As in GPT-2: normal(0.02), and less for weights that add to the residual stream, the deeper the model the
        less."""
        residual_std = _INIT_STD / math.sqrt(2 * self.shape.num_layers)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_residual = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(weight, std=residual_std if is_residual else _INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def _embed(self, ids: Tensor) -> Tensor:
        return embed(self.tokens, ids)

    def enter(self, ids: Tensor) -> tuple[Tensor, ...]:
        places, *visible = self._places(ids)
        stream: Tensor = self._embed(ids) + self.positions(places)
        if self.shape.dropout:
            stream = functional.dropout(stream, self.shape.dropout, self.training)
        return stream, *visible

    def _places(self, ids: Tensor) -> tuple[Tensor, ...]:
        """The position of each token. With a separator: in its own document, and which tokens it reads."""
        places = torch.arange(ids.shape[1], device=ids.device)
        if self.separator is None:
            return (places,)
        begins = ids == self.separator
        document = begins.cumsum(dim=1)
        first = torch.where(begins, places, 0).cummax(dim=1).values
        is_same = document[:, None, :, None] == document[:, None, None, :]
        return places - first, is_same & (places[:, None] >= places)

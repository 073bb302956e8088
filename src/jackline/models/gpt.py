"""A language model of the shape of GPT-2: pre-norm blocks, learned positions, causal attention by SDPA.

Owns the module and its initialisation. `stack` owns the way through it, `shapes` the named sizes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline import accelerator
from jackline.models import unfilled
from jackline.models.embedding import embed
from jackline.models.shapes import GPTShape
from jackline.models.stack import Stack

_INIT_STD = 0.02
_CHECK_ROWS = 256
_CHECK_LIMIT = 0.03  # bf16 has 8 bits of precision; a wrong kernel is off by far more


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
        self.has_kernels = False  # set by a caller that has checked `why_no_kernels`, before compiling

    def forward(self, stream: Tensor, visible: Tensor | None = None) -> Tensor:
        """`visible`: which tokens each one reads; None: all before it."""
        stream, added = self.split(stream, None, visible)
        return stream + added

    def split(
        self, stream: Tensor, added: Tensor | None = None, visible: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The block of `stream + added`; its result before the last addition."""
        if self.has_kernels and self.training and torch.is_grad_enabled():
            return self._split_by_kernels(stream, added, visible)
        stream = stream if added is None else stream + added
        stream = stream + self._drop(self._attend(self.attention_norm(stream), visible, self.projection))
        hidden: Tensor = self.activation(self.up(self.mlp_norm(stream)))
        return stream, self._drop(self.down(hidden))

    def _split_by_kernels(
        self, stream: Tensor, added: Tensor | None, visible: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same with fewer passes over memory. The biases of the layers that write to the stream are added by the
        kernel of the second norm, which thereby knows their gradients."""
        from jackline.models.block_kernel import add_norm, gelu

        norm = self.attention_norm
        if added is None:
            normed = norm(stream)
        else:
            stream, normed, *_ = add_norm(stream, added, norm.weight, norm.bias, norm.eps)
        branch = functional.linear(self._attend(normed, visible), self.projection.weight)
        norm, biases = self.mlp_norm, (self.projection.bias, self.down.bias)
        stream, normed, *_ = add_norm(stream, branch, norm.weight, norm.bias, norm.eps, *biases)
        hidden = gelu(functional.linear(normed, self.up.weight), self.up.bias)
        return stream, functional.linear(hidden, self.down.weight)

    def _attend(
        self, normed: Tensor, visible: Tensor | None, projection: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Attention, and its projection if asked for: what it holds meanwhile is part of what a plan foresees."""
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
        if projection is None:
            return mixed.transpose(1, 2).reshape(batch, length, width)
        return projection(mixed.transpose(1, 2).reshape(batch, length, width))

    def _drop(self, branch: Tensor) -> Tensor:
        # Not called at 0: dropout(p=0) would still draw from the RNG on some devices.
        return functional.dropout(branch, self.dropout, self.training) if self.dropout else branch


def why_no_kernels(block: Block) -> str:
    """Why the kernels of `block_kernel` cannot be used for this block on this machine. Empty when they can: they were
    run and gave the outputs and gradients of plain torch."""
    layers = (block.qkv, block.projection, block.up, block.down, block.attention_norm, block.mlp_norm)
    known = (nn.Linear, unfilled.Linear, nn.LayerNorm)
    if block.dropout or block.activation is not _gelu or any(type(layer) not in known for layer in layers):
        return "the block is not a plain one of GPT-2"
    weight = block.up.weight
    if not accelerator.is_on_gpu(weight) or weight.dtype != torch.bfloat16:
        return "they need bf16 weights on a GPU"
    try:
        with warnings.catch_warnings():  # torch warns about a context that it creates itself
            warnings.simplefilter("ignore")
            off = _compare(block)
    except Exception as problem:  # no Triton, no compiler, an unknown GPU: plain torch is used instead
        words = str(problem).strip().splitlines()
        return f"{type(problem).__name__}: {words[0][:100] if words else ''}"
    return f"they are off by {off:.1%} from plain torch" if off > _CHECK_LIMIT else ""


def _compare(block: Block) -> float:
    """The largest relative difference of outputs and gradients, with kernels and without, on a few rows."""
    weight = block.up.weight
    rng_state = torch.Generator(weight.device).manual_seed(1)
    inputs = [
        torch.randn(1, _CHECK_ROWS, weight.shape[1], generator=rng_state, device=weight.device, dtype=weight.dtype)
        for _ in range(3)
    ]
    found = []
    trained = [one for one in block.parameters() if one.requires_grad]
    for has_kernels in (True, False):
        trial = copy.copy(block)
        trial.has_kernels, trial.training = has_kernels, True
        stream, added = (one.clone().requires_grad_() for one in inputs[:2])
        with torch.enable_grad():
            result = torch.stack(trial.split(stream, added)).float()
            # A random weight for each number: the mean of a norm has no gradient.
            gradients = torch.autograd.grad((result * inputs[2].float()).sum(), [stream, added, *trained])
        found.append([result[0] + result[1], *gradients])
    return max(
        float((left.float() - right.float()).norm() / right.float().norm().clamp_min(1e-6))
        for left, right in zip(*found, strict=True)
    )


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

    def use_kernels(self) -> str:
        """Use the kernels from now on, or return why they cannot be used. Call it once the model has its device and
        dtype, and before compiling it."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        reason = why_no_kernels(blocks[0])
        for block in blocks:
            block.has_kernels = not reason
        return reason

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

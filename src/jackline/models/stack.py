"""A language model that is a stack of equal blocks: what all of ours share, and how such a model is compiled.

Owns the way through the model and its compilation in parts. What a block computes, and how ids become the stream that
passes through the blocks, belongs to the models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jackline.models.loss import summed_cross_entropy


class _Parts(NamedTuple):
    """Of a compiled model."""

    enter: Callable[[Tensor], tuple[Tensor, ...]]
    split: Callable[..., tuple[Tensor, Tensor]]
    whole: Callable[..., Tensor]
    leave: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def _split(block: Any, stream: Tensor, added: Tensor, *context: Tensor) -> tuple[Tensor, Tensor]:
    split: tuple[Tensor, Tensor] = block.split(stream, added, *context)
    return split


def _whole(block: Any, stream: Tensor, *context: Tensor) -> Tensor:
    passed: Tensor = block(stream, *context)
    return passed


class Stack(nn.Module):
    """`model(ids)` gives logits, `model(ids, targets)` the summed loss; divide by your own count."""

    blocks: nn.ModuleList  # each has `split`: its result before the last addition, (stream, what is added to it)
    norm: nn.Module
    head: nn.Linear

    def __init__(self, *, is_recomputing: bool = False, loss_chunk_rows: int = 0) -> None:
        super().__init__()
        self.is_recomputing = is_recomputing
        self.loss_chunk_rows = loss_chunk_rows
        self.has_loss_kernel = False  # set by a caller that has checked `loss.why_no_kernel`, before compiling
        self.label_smoothing = 0.0  # of the loss while training

    def enter(self, ids: Tensor) -> tuple[Tensor, ...]:
        """The stream that passes through the blocks, and what every block is given beside it."""
        raise NotImplementedError

    def leave(self, stream: Tensor, added: Tensor | None, targets: Tensor | None) -> Tensor:
        hidden = self.norm(stream if added is None else stream + added)
        if targets is None:
            logits: Tensor = self.head(hidden)
            return logits
        return summed_cross_entropy(
            self.head,
            hidden,
            targets,
            chunk_rows=self.loss_chunk_rows,
            has_kernel=self.has_loss_kernel,
            smoothing=self.label_smoothing if self.training else 0.0,
        )

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        stream, *context = self.enter(ids)
        for block in self.blocks:
            if self.is_recomputing and self.training:
                stream = checkpoint(block, stream, *context, use_reentrant=False)
            else:
                stream = block(stream, *context)
        return self.leave(stream, None, targets)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`model(...)` is compiled from now on, in parts: the entry, a block, the exit. `model.forward(...)` is not.

        All blocks share the code of one, so that the first step of a GPT-2 of 124M on an H200 comes 12 s earlier than
        with the whole model as one graph, and a step takes 0.4 % longer. The parts are cut just before an addition,
        which the compiler joins with the norm behind it: cut after it, it is 0.9 % (bench/throughput.py --variants).
        A model or block with hooks (fully_shard's gather weights) is called as it is: a part would pass them by.
        """
        compiled = partial(torch.compile, *args, **kwargs)
        self._compiled_call_impl = partial(
            self._forward_in_parts, _Parts(*map(compiled, (self.enter, _split, _whole, self.leave)))
        )

    def _forward_in_parts(self, parts: _Parts, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        if any(part._forward_pre_hooks or part._forward_hooks for part in (self, *self.blocks)):
            hooked: Tensor = self._call_impl(ids, targets)  # type: ignore[no-untyped-call]
            return hooked
        stream, *context = parts.enter(ids)
        added = None
        if self.is_recomputing and self.training:
            for block in self.blocks:  # one tensor is kept for each block, not two
                stream = checkpoint(parts.whole, block, stream, *context, use_reentrant=False)
        else:
            # Zeros that need a gradient, because the code of a block is for such an input.
            added = torch.zeros_like(stream, requires_grad=stream.requires_grad)
            for block in self.blocks:
                stream, added = parts.split(block, stream, added, *context)
        return parts.leave(stream, added, targets)

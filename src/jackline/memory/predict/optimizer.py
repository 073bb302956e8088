"""AdamW as each of its implementations allocates it, on the meta device.

Owns the memory of the update alone. It is played and not run: the fused one refuses the meta device, and the stock
ones import PyTorch's compiler, a second of CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from jackline.memory.predict.job import OptimizerKind, StepOptions


class MetaAdamW:
    """Two moments a weight, made at the first step. The fused kernel needs nothing beside them, the foreach one the
    roots of all second moments at once, the for-loop one those of a single weight.

    With bf16 weights there is a float32 master; gradients are widened for the update, and the bf16 ones dropped.
    """

    def __init__(self, weights: list[nn.Parameter], options: StepOptions) -> None:
        self._weights = weights
        self._kind: OptimizerKind = options.optimizer
        has_master = options.precision == "bf16-weights"
        self._masters = [torch.empty_like(weight, dtype=torch.float32) for weight in weights] if has_master else []
        self._moments: list[Tensor] = []

    def step(self) -> None:
        if not self._moments:
            self._make_moments()
        wide = []
        for weight in self._weights if self._masters else ():
            if weight.grad is not None:
                wide.append(weight.grad.to(torch.float32))
                weight.grad = None
        if self._kind == "foreach":
            roots = [torch.empty_like(weight, dtype=torch.float32) for weight in self._weights]
            del roots
        elif self._kind == "for-loop":
            for weight in self._weights:
                torch.empty_like(weight, dtype=torch.float32)

    def _make_moments(self) -> None:
        for weight in self._weights:
            if self._kind == "fused":
                self._moments.append(torch.empty((), dtype=torch.float32))  # the step count, on the card
            self._moments += [torch.empty_like(weight, dtype=torch.float32) for _ in range(2)]

    def state_tensors(self) -> Iterator[Tensor]:
        yield from self._masters
        yield from self._moments

"""AdamW as each of its implementations allocates it, on the meta device.

Owns the memory of the update alone. The stock foreach and for-loop ones run as they are; the fused one refuses the
meta device and is played; so are bf16 weights with a float32 master.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from jackline.memory.job import StepOptions


class MetaOptimizer(Protocol):
    def step(self) -> object: ...

    def state_tensors(self) -> Iterator[Tensor]: ...


def make_optimizer(weights: list[nn.Parameter], options: StepOptions) -> MetaOptimizer:
    if options.precision == "bf16-weights":
        return _Played(weights, has_master=True, state_bytes=1 if options.optimizer == "8bit" else 4)
    if options.optimizer in ("fused", "8bit"):
        return _Played(weights, has_master=False, state_bytes=1 if options.optimizer == "8bit" else 4)
    return _Stock(weights, is_foreach=options.optimizer == "foreach")


class _Stock:
    def __init__(self, weights: list[nn.Parameter], *, is_foreach: bool) -> None:
        self._optimizer = torch.optim.AdamW(weights, lr=1e-4, foreach=is_foreach, fused=False)

    def step(self) -> None:
        self._optimizer.step()

    def state_tensors(self) -> Iterator[Tensor]:
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


class _Played:
    """Moments made at the first step, as stock AdamW does; the fused kernel needs nothing beside them.

    With a float32 master the gradients are widened for the update and the bf16 ones dropped first.
    """

    def __init__(self, weights: list[nn.Parameter], *, has_master: bool, state_bytes: int) -> None:
        self._weights = weights
        self._dtype = torch.float32 if state_bytes == 4 else torch.uint8
        self._masters = [torch.empty_like(weight, dtype=torch.float32) for weight in weights] if has_master else []
        self._moments: list[Tensor] = []

    def step(self) -> None:
        wide = []
        for weight in self._weights if self._masters else ():
            if weight.grad is not None:
                wide.append(weight.grad.to(torch.float32))
                weight.grad = None
        if not self._moments:
            for weight in self._weights:
                self._moments.append(torch.empty((), dtype=torch.float32))  # the step, on the card when fused
                self._moments += [torch.empty_like(weight, dtype=self._dtype) for _ in range(2)]

    def state_tensors(self) -> Iterator[Tensor]:
        yield from self._masters
        yield from self._moments

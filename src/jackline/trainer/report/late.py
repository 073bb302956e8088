"""Numbers of a step that are read when the device has got that far, never before: reading at once would make it wait.

Owns the way of loss and gradient norm from the device to the host. On a CPU they are known at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Facts = TypeVar("Facts")


@dataclass(frozen=True)
class Arrived(Generic[Facts]):
    """What was handed in with a step, and its numbers."""

    facts: Facts
    loss: float
    grad_norm: float


class LateNumbers(Generic[Facts]):
    """`put` costs 20 us and never waits; `take` gives what is known by now, in order."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_card = device.type == "cuda"
        self._coming: deque[tuple[Facts, Tensor, Any]] = deque()

    def put(self, facts: Facts, loss: Tensor, grad_norm: Tensor) -> None:
        both = torch.stack((loss.detach().float(), grad_norm.detach().float()))
        if not self._is_on_card:
            self._coming.append((facts, both, None))
            return
        buffer = torch.empty(2, dtype=torch.float32, pin_memory=True)
        buffer.copy_(both, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._coming.append((facts, buffer, event))

    def take(self, *, wait: bool = False) -> list[Arrived[Facts]]:
        """`wait`: all of them, at the end of a run or before an evaluation, which waits anyway."""
        found = []
        while self._coming:
            facts, numbers, event = self._coming[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._coming.popleft()
            loss, grad_norm = numbers.tolist()
            found.append(Arrived(facts, loss, grad_norm))
        return found

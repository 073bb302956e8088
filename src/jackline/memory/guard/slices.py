"""All slices of one step at one micro-batch: forward, backward, and the division by the count of the whole step.

Owns the order of the slices, what ranks exchange, and when the step's loss is known. Does not own what follows when
they do not fit (safe_step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from jackline import accelerator
from jackline.errors import UsageError
from jackline.memory.guard.batches import take_slice
from jackline.memory.guard.oom import first_line, is_out_of_memory


class Team(Protocol):
    """Ranks that make one step's gradients together, each from its share of the batch."""

    @property
    def size(self) -> int: ...
    @property
    def is_sharded(self) -> bool:
        """FSDP2: torch exchanges parameters in each pass, so no rank can repeat a step alone; averages gradients."""

    def any_failed(self, is_failed: bool) -> bool:
        """Whether one of the ranks ran out of memory. All of them ask, after their last slice."""

    def total(self, count: float) -> float:
        """The sum over all ranks."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all ranks into each of these."""

    def without_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside exchange nothing: that happens once a step, when it is known that all ranks fit."""

    def before_slice(self, is_last: bool) -> None:
        """With FSDP2: gradients are exchanged in the backward pass of the last slice."""


@dataclass(frozen=True)
class Failure:
    """What is kept of an out-of-memory error: text and numbers, no tensors."""

    phase: str
    slice_number: int
    error: str
    text: str


class Slices:
    """All slices of one step at one micro-batch."""

    def __init__(
        self,
        fn: Callable[[Any], Any],
        weight: Callable[[Any], float] | None,
        count: float | None,
        scaler: Any,
        modules: Sequence[nn.Module],
    ) -> None:
        self._fn, self._weight, self._scaler, self._modules = fn, weight, scaler, modules
        self._known_count = count
        self._divisor = count
        self._sum: Tensor | None = None
        self._phase = "forward"
        self.on_phase: Callable[[str], None] | None = None
        self.team: Team | None = None
        self.total = 0.0
        self.num_slices = self.micro_batch = 0
        self.wants_loss = False  # that `known_loss` is asked for before the update
        self._arriving: tuple[Tensor, Any] | None = None

    def run(self, batch: Any, num_samples: int, micro_batch: int) -> Failure | None:
        self.micro_batch = micro_batch
        try:
            with self.team.without_sync() if self.team is not None else nullcontext():
                self.go(batch, num_samples, micro_batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return Failure(self._phase, self.num_slices, first_line(error), str(error))
        return None

    def go(self, batch: Any, num_samples: int, micro_batch: int) -> None:
        num_slices = -(-num_samples // micro_batch)
        if self.team is not None:  # the same on every rank, and put right at the end where it was a guess
            self._divisor = (self._known_count or float(num_samples * self.team.size)) / self._shares
        for begin in range(0, num_samples, micro_batch):
            part = take_slice(batch, begin, begin + micro_batch)
            if self.team is not None:
                self.team.before_slice(begin + micro_batch >= num_samples)
            self._enter("forward", num_slices)
            loss_sum, count = self._evaluate(part)
            if self._divisor is None:
                # The count of the first slice, scaled up to the whole batch. It is exact when all samples have the
                # same count, and corrected at the end otherwise. Without a divisor fp16 gradients of a sum would
                # overflow.
                self._divisor = max(1.0, count * num_samples / min(micro_batch, num_samples))
            loss = loss_sum / self._divisor
            self._sum = loss_sum.detach() if self._sum is None else self._sum + loss_sum.detach()
            self.total += count
            if self.wants_loss and begin + micro_batch >= num_samples:
                self._arriving = _begin_to_read(self._sum)
            self._enter("backward", num_slices)
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
            self.num_slices += 1
        if self.team is None:
            self._put_right()

    def exchange(self) -> None:
        """With several ranks: add up counts, loss and gradients, in the order of the parameters."""
        if self.team is None:
            return
        assert self._sum is not None
        gradients = [
            weight.grad
            for module in (() if self.team.is_sharded else self._modules)
            for weight in module.parameters()
            if weight.grad is not None
        ]
        self.total = self.team.total(self.total)
        self.team.add_up([self._sum, *gradients])
        self._put_right()

    @property
    def _shares(self) -> int:
        """Into how many parts torch divides the sum of gradients by itself."""
        return self.team.size if self.team is not None and self.team.is_sharded else 1

    def _enter(self, phase: str, num_slices: int) -> None:
        self._phase = phase
        if self.on_phase is not None:
            self.on_phase(phase if num_slices == 1 else f"{phase} {self.num_slices + 1} of {num_slices}")

    def _evaluate(self, part: Any) -> tuple[Tensor, float]:
        made = self._fn(part)
        if isinstance(made, Tensor):
            if self._weight is None:
                raise UsageError(
                    "fn returned a single tensor: a mean over slices of different size would weigh samples wrongly",
                    hint="return (loss_sum, count), or give weight=: how much a slice's mean counts for",
                )
            count = float(self._weight(part))
            return made * count, count
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Tensor) and made[0].dim() == 0):
            raise UsageError(f"fn returned {type(made).__name__}, not (loss_sum, count) with a scalar loss_sum")
        return made[0], float(made[1])

    def _put_right(self) -> None:
        """Correct the gradients: the divisor was an estimate, and now the true count is known."""
        wanted = (self._known_count or max(1.0, self.total)) / self._shares
        if self._divisor is None or wanted == self._divisor:
            return
        factor = self._divisor / wanted
        for module in self._modules:
            for weight in module.parameters():
                if weight.grad is not None:
                    weight.grad.mul_(factor)

    def loss(self) -> Tensor:
        assert self._sum is not None
        return self._sum / (self._known_count or max(1.0, self.total))

    def known_loss(self) -> float:
        """The step's loss as a number. On a GPU it is on its way since before the last backward pass, so the wait
        ends while that pass still runs: the update is launched in time, and the GPU never idles."""
        assert self._arriving is not None
        value, event = self._arriving
        if event is not None:
            event.synchronize()
        return float(value) / (self._known_count or max(1.0, self.total))

    def only_forward(self, batch: Any, num_samples: int, micro_batch: int) -> float:
        """The mean loss of a batch, without gradients. Not under no_grad: a compiled model would be compiled anew."""
        total, count = 0.0, 0.0
        for begin in range(0, num_samples, micro_batch):
            loss_sum, counted = self._evaluate(take_slice(batch, begin, begin + micro_batch))
            total, count = total + float(loss_sum.detach()), count + counted
        return total / (self._known_count or max(1.0, count))


def _begin_to_read(value: Tensor) -> tuple[Tensor, Any]:
    if not accelerator.is_on_gpu(value):
        return value, None
    slot = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
    slot.copy_(value, non_blocking=True)
    event = accelerator.new_event(is_blocking=True)
    event.record()
    return slot, event

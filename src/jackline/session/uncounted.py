"""Batches that end without a counted step: does the loop accumulate, train in a way torch does not report, or wait?

Owns the decision, batch by batch. Evidence: which optimizers stepped, whether their weights changed without that, and
whether gradients are being added up. Counts nothing and saves nothing (stepping.py, run.py).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

PATIENCE = 50  # batches without a step after which the question is decided, and the user is told
LONG_PATIENCE = 256  # the same while gradients are being added up: that may be a large batch
_SAMPLED = 64  # values of each parameter that are compared
_version = operator.attrgetter("_version")
Outcome = Literal["accumulating", "step", "rest"]
Tell = Callable[[str], None]


class Uncounted:
    """Looks at every batch that ended without a counted step.

    `by_batch`: each batch counts as a step, since the weights change although no optimizer reports it. `idle`: the
    optimizers that are not waited for. `count`: batches since the last counted step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.by_batch = False
        self.idle: set[int] = set()
        self.count = 0
        self.tell: Tell = lambda _: None
        self._longest = 0  # batches of the longest step so far
        self._optimizers = optimizers
        self._versions = -1
        self._gradients: list[Any] = [None] * len(optimizers)
        self._sample: list[torch.Tensor] | None = None
        self._has_told: set[str] = set()

    @property
    def is_overdue(self) -> bool:
        """Whether a stop request has waited long enough for the end of this step."""
        return self.count >= max(LONG_PATIENCE, 4 * self._longest)

    def begin(self) -> None:
        """A pass begins: what has changed until now is not the loop's."""
        self._versions = self._read_versions()

    def counted(self) -> None:
        """A step was counted in this batch."""
        self._longest = max(self._longest, self.count + 1)
        self.count, self._sample, self._versions = 0, None, -1

    def look(self, stepped: set[int]) -> Outcome:
        """A batch ended and no step was counted. `stepped`: the optimizers that stepped since the last one was."""
        self.count += 1
        if self._longest and self.count <= max(4 * self._longest, PATIENCE) and not self.by_batch:
            return "accumulating"  # the loop has shown how many batches its steps may have
        before, self._versions = self._versions, self._read_versions()
        pending = [number for number in range(len(self._optimizers)) if self._is_pending(number)]
        if stepped:
            return self._look_at_some(stepped, pending)
        has_gradients = any(gradients for gradients in self._gradients)
        if before not in (-1, self._versions) and not has_gradients:
            return self._count_batches()
        if self.by_batch:
            return "step"
        return self._look_at_none(pending)

    def state(self) -> dict[str, Any]:
        """For the checkpoint: a resumed run counts as this one did."""
        return {
            "by_batch": self.by_batch,
            "idle": sorted(self.idle),
            "uncounted": self.count,
            "longest": self._longest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.by_batch = bool(state.get("by_batch"))
        self.idle = {number for number in map(int, state.get("idle", ())) if number < len(self._optimizers)}
        self.count, self._longest = int(state.get("uncounted", 0)), int(state.get("longest", 0))

    # -- private -----------------------------------------------------------------------------------------------------

    def _look_at_some(self, stepped: set[int], pending: list[int]) -> Outcome:
        """Some optimizers step and others do not: one that starts late, or has done its part."""
        missing = [number for number in range(len(self._optimizers)) if number not in stepped | self.idle]
        if self.count < PATIENCE or set(missing) & set(pending):
            return self._wait()
        self.idle |= set(missing)
        names = ", ".join(f"{type(self._optimizers[number]).__name__} (number {number})" for number in missing)
        self._tell_once(
            f"idle {missing}",
            f"{self.count} batches without a step of the attached optimizer {names}: it is not waited for until it "
            "steps; until then a step is one of the others",
        )
        return "step"

    def _look_at_none(self, pending: list[int]) -> Outcome:
        if self.count in (PATIENCE // 2, LONG_PATIENCE // 2):
            self._sample = self._read_sample()
        if self.count >= PATIENCE and self._sample is not None:
            sample = self._read_sample()
            if not all(map(torch.equal, sample, self._sample)):
                return self._count_batches()
        if pending or self.count < PATIENCE:
            return self._wait()
        self._tell_once(
            "rest",
            f"{self.count} batches without a step of an attached optimizer, and no gradients: checkpoints are taken "
            "between batches until it steps. total= counts its steps",
        )
        return "rest"

    def _wait(self) -> Outcome:
        if self.count >= LONG_PATIENCE and self.is_overdue:
            self._tell_once(
                "long",
                f"{self.count} batches without a step of all attached optimizers, while gradients are added up: "
                "nothing is saved before the step ends. Is optimizer.step() missing?",
            )
        return "accumulating"

    def _count_batches(self) -> Outcome:
        self.by_batch = True
        self._tell_once(
            "by batch",
            "the weights change, but no attached optimizer reports a step: each batch counts as a step, also for "
            "total=. If a step has several batches, set accumulate= in attach()",
        )
        return "step"

    def _tell_once(self, key: str, text: str) -> None:
        if key not in self._has_told:
            self._has_told.add(key)
            self.tell(text)

    def _is_pending(self, number: int) -> bool:
        """Whether gradients are being added up: the same tensors as before, with new values that are not all zero.

        A gradient that is a new tensor after every batch was reset on the way.
        """
        before = self._gradients[number]
        found = [p.grad for p in _parameters(self._optimizers[number]) if p.grad is not None]
        self._gradients[number] = [(weakref.ref(gradient), gradient._version) for gradient in found]
        if not found:
            return False
        if before is None or self.count < PATIENCE:
            return True
        known = {id(reference()): version for reference, version in before}
        grown = [gradient for gradient in found if known.get(id(gradient), gradient._version) != gradient._version]
        return any(bool(gradient.any()) for gradient in grown)

    def _read_versions(self) -> int:
        return sum(sum(map(_version, _parameters(optimizer))) for optimizer in self._optimizers)

    def _read_sample(self) -> list[torch.Tensor]:
        """Some values of each parameter: a write through `.data` or numpy has no version."""
        with torch.no_grad():
            parameters = [p for optimizer in self._optimizers for p in _parameters(optimizer)]
            return [p.detach().reshape(-1)[:: max(1, p.numel() // _SAMPLED)].clone() for p in parameters]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not torch.nn.parameter.is_lazy(parameter)
    ]

"""Sentinels of single numbers: not finite, exactly zero, not the planned learning rate. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jackline.trainer.optim.schedule import lr_at
from jackline.trainer.sentinels.facts import Alarm, Facts, Found, StepFacts
from jackline.trainer.sentinels.loss import batch_ids


class NotFinite:
    """NaN or infinite. With the batch's ids; which tensor was the first is `sentinels_torch.first_bad_tensor`'s.

    The fp16 scaler finds its scale by overflowing now and then, so a skipped step is no alarm; 25 in a row are.
    """

    _SKIPS = 25

    def __init__(self) -> None:
        self._skips = 0

    def look(self, step: StepFacts) -> Iterator[Found]:
        self._skips = self._skips + 1 if step.is_skipped else 0
        if step.is_skipped:
            if self._skips >= self._SKIPS:
                yield Alarm(
                    "always-skipped",
                    f"{self._skips} steps in a row had infinite gradients and were skipped",
                    "fp16 cannot hold these gradients; precision=bf16 or precision=fp32 can",
                    True,
                )
            return
        for name, value in (("loss", step.loss), ("gradient norm", step.grad_norm)):
            if value is not None and not math.isfinite(value):
                ids = f"; its windows: {batch_ids(step.windows)}" if len(step.windows) else ""
                yield Alarm(
                    "not-finite",
                    f"{name} is {value}{ids}",
                    "the weights are lost by this update; resume from the last checkpoint with a lower lr or"
                    " precision=fp32, and --continue-with-changes",
                    is_fatal=True,
                    is_ruin=True,
                )
                return

    def state(self) -> dict[str, Any]:
        return {"skips": self._skips}

    def load(self, state: dict[str, Any]) -> None:
        self._skips = state["skips"]


class ZeroGradient:
    """A gradient norm of exactly 0 twice running: nothing reaches the weights, or it was read after zero_grad."""

    _STEPS = 2

    def __init__(self) -> None:
        self._steps = 0

    def look(self, step: StepFacts) -> Iterator[Found]:
        if step.grad_norm is None or step.is_skipped:
            return
        self._steps = self._steps + 1 if step.grad_norm == 0 else 0
        if self._steps >= self._STEPS:
            yield Alarm(
                "zero-gradient",
                f"the gradient norm was exactly 0 for {self._steps} steps: no weight learns anything",
                "the loss is cut off from the weights (detach, no_grad, all targets ignored), or fp16 lost it",
                True,
            )

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]


class WrongRate:
    """The learning rate in use against the schedule's. A scheduler stepped twice, or not at all after a resume."""

    _NEAR = 1e-4

    def __init__(self, facts: Facts) -> None:
        self._schedule = facts.schedule

    def look(self, step: StepFacts) -> Iterator[Found]:
        if self._schedule is None or step.lr is None or step.step < 1:
            return
        planned = lr_at(step.step - 1, self._schedule)
        if abs(step.lr - planned) > self._NEAR * max(planned, self._schedule.lr * 1e-6):
            yield Alarm(
                "wrong-lr",
                f"the learning rate is {step.lr:.4g}, the schedule says {planned:.4g}",
                "the optimizer's rate was set by something else, or steps are counted differently",
            )

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        return

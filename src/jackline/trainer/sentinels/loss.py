"""Sentinels of the loss's size: impossibly low, stuck at guessing, suddenly high. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from jackline.trainer.sentinels.facts import Alarm, EvalFacts, Facts, Found, StepFacts

_LEAK_HINT = (
    "the model very likely sees its targets: check that attention is causal, that targets are shifted by one,"
    " and that validation text is not in the training set"
)


class LossUnderFloor:
    """Better than any honest prediction could be: the targets leak into the inputs.

    Only while data is seen for the first time: text seen twice can be learnt by heart. Over noise the argument is
    exact: for predictions made before the tokens are seen, exp(sum of (entropy - loss)) has a mean of at most 1, so
    a sum of 30 has a chance of e^-30. Over text the mean of the last steps is held against the floor.
    """

    _STEPS = 8
    _NOISE_NATS = 30.0

    def __init__(self, facts: Facts) -> None:
        self._floor = facts.floor
        self._is_any_loss = facts.is_any_loss
        self._tokens = max(1, facts.tokens_per_step)
        self._recent: deque[float] = deque(maxlen=self._STEPS)
        self._won_nats = 0.0

    def look(self, step: StepFacts) -> Iterator[Found]:
        loss = step.loss
        if loss is None or not math.isfinite(loss):
            return
        if loss < 0 and not self._is_any_loss:
            yield Alarm(
                "loss-under-floor",
                f"loss {loss:.4g} is below 0, which no cross-entropy can be",
                "look at how the loss is summed and divided",
                True,
            )
            return
        if step.epoch > 0 or self._floor is None:
            return
        self._recent.append(loss)
        if self._floor.is_noise:
            # Never below 0: what was lost to a bad start must not be a credit for a leak that begins later.
            self._won_nats = max(0.0, self._won_nats + self._tokens * (self._floor.nats - loss))
            if self._won_nats > self._NOISE_NATS:
                yield self._alarm(loss, "")
        elif len(self._recent) == self._STEPS and fmean(self._recent) < self._floor.nats:
            yield self._alarm(fmean(self._recent), f" over {self._STEPS} steps")

    def look_eval(self, facts: EvalFacts) -> Iterator[Found]:
        """Validation text is never trained on, so here the floor holds in every epoch."""
        if self._floor is None or not facts.losses:
            return
        loss = fmean(facts.losses)
        if math.isfinite(loss) and loss < self._floor.nats:
            yield self._alarm(loss, " in validation")

    def _alarm(self, loss: float, where: str) -> Found:
        assert self._floor is not None
        limit = f"{self._floor.nats:.3g}: {self._floor.why}"
        text = f"loss {loss:.4g}{where} is lower than honest predictions can be ({limit})"
        return Alarm("loss-under-floor", text, _LEAK_HINT, True)

    def state(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "won_nats": self._won_nats}

    def load(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=self._STEPS)
        self._won_nats = state["won_nats"]


class FlatLoss:
    """Still about ln V, where a model that has learnt nothing is, and no better than at the start.

    Any text falls away from there in the first dozens of steps, because some tokens are common. Looked at only when
    the rates so far add up to enough (Adam moves a weight by about the rate each step, weights begin at 0.02) or the
    warm-up is over, so that a long warm-up is no alarm; and not on noise, where ln V is the truth. A model trained
    before begins far below ln V, so it may stay where it is.
    """

    _STEPS = 50
    _FIRST = 10
    _NEAR = 0.1  # of ln V: how far from it an untrained model may begin
    _LEFT = 0.01  # of ln V: a fall that is one
    _SMOOTH = 0.1  # share of the newest loss in the running mean: small batches jump about
    _ENOUGH_LR = 3e-3

    def __init__(self, facts: Facts) -> None:
        self._ceiling = math.log(max(2, facts.vocab_size))
        self._is_noise = facts.floor is not None and facts.floor.is_noise
        self._warmup_steps = facts.schedule.warmup_steps if facts.schedule else 0
        self._num_first = 0
        self._first = self._mean = 0.0
        self._flat_steps = 0
        self._sum_lr = 0.0

    def look(self, step: StepFacts) -> Iterator[Found]:
        if self._is_noise or step.loss is None or not math.isfinite(step.loss):
            return
        self._sum_lr += step.lr or 0.0
        if self._num_first < self._FIRST:
            self._num_first += 1
            self._first += (step.loss - self._first) / self._num_first
            self._mean = self._first
        self._mean += self._SMOOTH * (step.loss - self._mean)
        is_near = abs(self._mean - self._ceiling) < self._NEAR * self._ceiling
        has_fallen = self._mean < self._first - self._LEFT * self._ceiling
        self._flat_steps = self._flat_steps + 1 if is_near and not has_fallen else 0
        has_had_time = step.step > self._warmup_steps or self._sum_lr >= self._ENOUGH_LR
        if self._flat_steps >= self._STEPS and has_had_time:
            yield Alarm(
                "loss-flat",
                f"loss {self._mean:.4f} is still about ln(V) = {self._ceiling:.4f}, as at the start, after"
                f" {self._flat_steps} steps: nothing is being learnt",
                "look at the learning rate, at whether the optimizer has the model's weights, and at the data",
            )

    def state(self) -> dict[str, Any]:
        names = ("num_first", "first", "mean", "flat_steps", "sum_lr")
        return {name: getattr(self, f"_{name}") for name in names}

    def load(self, state: dict[str, Any]) -> None:
        self._num_first, self._first, self._mean = state["num_first"], state["first"], state["mean"]
        self._flat_steps, self._sum_lr = state["flat_steps"], state["sum_lr"]


class LossSpike:
    """Far above what the last steps were; and one that does not come down again.

    Far: 10 times the usual scatter (by medians, so that one odd step does not count), and more than a few odd
    documents can do to a batch of this size. Steps inside a spike do not become the new usual for a while.
    """

    _WINDOW = 64
    _FIRST = 24
    _SCATTERS = 10.0
    _LEAST_NATS = 0.3
    _ODD_NATS = 40.0  # over the square root of the tokens of a step
    _ODD_TIMES = 100.0  # a loss with powers of the error is looked at by its logarithm
    _LASTING = 64

    def __init__(self, facts: Facts) -> None:
        self._is_language = bool(facts.vocab_size)
        few = max(self._LEAST_NATS, self._ODD_NATS / math.sqrt(max(1, facts.tokens_per_step)))
        self._least = few if self._is_language else math.log(self._ODD_TIMES)
        self._usual: deque[float] = deque(maxlen=self._WINDOW)
        self._high_steps = 0

    def look(self, step: StepFacts) -> Iterator[Found]:
        if step.loss is None or not math.isfinite(step.loss):
            return
        if step.loss <= 0 and not self._is_language:
            self._usual.clear()  # it has no logarithm, and its size says nothing
            return
        loss = step.loss if self._is_language else math.log(max(step.loss, 1e-30))
        if len(self._usual) < self._FIRST:
            self._usual.append(loss)
            return
        # The two medians cost 5 us, and a loss that is not even the highest of the window needs neither.
        if loss <= max(self._usual):
            self._usual.append(loss)
            self._high_steps = 0
            return
        middle = median(self._usual)
        scatter = 1.4826 * median(abs(value - middle) for value in self._usual)
        if loss <= middle + max(self._SCATTERS * scatter, self._least):
            self._usual.append(loss)
            self._high_steps = 0
            return
        self._high_steps += 1
        if self._high_steps == 1:
            yield self._spike(step, middle)
        if self._high_steps == self._LASTING:
            self._usual.clear()
            yield Alarm(
                "loss-diverged",
                f"loss {step.loss:.4g} has not come down for {self._LASTING} steps; it was"
                f" {self._shown(middle):.4g} before",
                "go back to a checkpoint before it, with a lower lr or a longer warm-up",
                True,
            )

    def _shown(self, value: float) -> float:
        return value if self._is_language else math.exp(value)

    def _spike(self, step: StepFacts, middle: float) -> Found:
        ids = f"; its windows: {batch_ids(step.windows)}" if len(step.windows) else ""
        return Alarm(
            "loss-spike",
            f"loss jumped to {step.loss:.4g} from {self._shown(middle):.4g}{ids}",
            "one spike that comes down is common; several ask for a lower lr, clip=1.0 or a look at that batch",
        )

    def state(self) -> dict[str, Any]:
        return {"usual": list(self._usual), "high_steps": self._high_steps}

    def load(self, state: dict[str, Any]) -> None:
        self._usual = deque(state["usual"], maxlen=self._WINDOW)
        self._high_steps = state["high_steps"]


def batch_ids(windows: Any, shown: int = 8) -> str:
    """'5120, 81920, ... (32 in all)': what names a batch when it must be looked up."""
    first = ", ".join(str(int(window)) for window in windows[:shown])
    return first if len(windows) <= shown else f"{first}, ... ({len(windows)} in all)"

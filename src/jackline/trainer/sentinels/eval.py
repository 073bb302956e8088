"""Sentinel of validation: is the improvement larger than what a validation this small can tell?

Owns the interval. Two validations of the same parts are compared part by part: a hard text is hard both times, so the
scatter of the differences is far smaller than that of the losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from jackline.trainer.sentinels.facts import Alarm, EvalFacts, Facts, Found

# Two-sided 95 % of Student's t for 1, 2, ... degrees of freedom; from 30 on the normal's.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10,
        2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05)  # fmt: skip
_MAX_PARTS = 512


def interval_95(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean difference; None for fewer than two pairs."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    count = len(differences)
    if count < 2:
        return None
    factor = _T95[count - 2] if count - 2 < len(_T95) else 1.96
    return factor * stdev(differences) / math.sqrt(count)


class SmallValidation:
    """Speaks when a new best is claimed that is within the interval, and then says how many parts could tell."""

    def __init__(self, facts: Facts) -> None:
        self._full_parts = facts.full_validation_parts
        self._best: list[float] = []

    def look(self, facts: EvalFacts) -> Iterator[Found]:
        losses = _bounded(facts.losses)
        if not losses or not all(math.isfinite(loss) for loss in losses):
            return
        before = self._best
        if len(before) != len(losses):
            # The first, or other parts than before; the full one at the end is compared with nothing.
            self._best = losses if facts.is_subset or not before else before
            return
        if fmean(losses) >= fmean(before):
            return
        self._best = losses
        gain = fmean(before) - fmean(losses)
        width = interval_95(before, losses)
        if width is None:
            text = f"validation has {len(losses)} part: whether {fmean(losses):.4f} is better cannot be told"
            yield Alarm("validation-too-small", text, "eval_share=1 or a larger val_fraction")
        elif gain < width:
            needed = math.ceil(len(losses) * (width / max(gain, 1e-12)) ** 2)
            yield Alarm("validation-too-small", self._text(facts, gain, width), self._hint(facts, needed))

    def _text(self, facts: EvalFacts, gain: float, width: float) -> str:
        tokens = len(facts.losses) * facts.tokens_per_part
        return (
            f"validation loss {fmean(facts.losses):.4f} counts as the new best by {gain:.2g}, but {len(facts.losses)}"
            f" parts ({tokens:,} tokens) can only tell changes above {width:.2g}"
        )

    def _hint(self, facts: EvalFacts, needed: int) -> str:
        full = self._full_parts
        if facts.is_subset and full is not None and needed <= full:
            return f"about {needed:,} parts would tell, and there are {full:,}: a larger eval_share"
        return "take it as unchanged; a larger val_fraction would tell smaller changes"

    def state(self) -> dict[str, Any]:
        return {"best": self._best}

    def load(self, state: dict[str, Any]) -> None:
        self._best = [float(loss) for loss in state["best"]]


def _bounded(losses: Sequence[float]) -> list[float]:
    """At most 512 numbers to keep: neighbours are averaged, which makes the interval no smaller than it is."""
    size = -(-len(losses) // _MAX_PARTS)
    whole = len(losses) - len(losses) % size if size else 0
    return [fmean(losses[at : at + size]) for at in range(0, whole, size)] if size else []

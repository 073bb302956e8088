"""Sentinel of data seen twice within an epoch: a position lost at resume, two ranks with one share, a short loop.

Owns a memory of windows that stays small however long the epoch: the last few thousand exactly, so that a batch given
out twice is found at once, and of all before them a sample chosen by a hash of the window's id. The sample halves
itself when it is full, so it always spans the whole epoch: of a hundred million windows it knows one in 25,000, and a
repeated stretch of a few per cent cannot slip through it.

The second sentinel is that of validation: is the improvement larger than what a validation this small can tell? Two
validations of the same parts are compared part by part: a hard text is hard both times, so the scatter of the
differences is far smaller than that of the losses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jackline.trainer.sentinels.facts import Alarm, EvalFacts, Facts, Found, StepFacts
from jackline.trainer.sentinels.loss import batch_ids

_RECENT = 4096
_SAMPLE = 4096
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_ALL = (1 << 32) - 1


class RepeatedData:
    """State holds the sample and not the recent windows: those are known again after a few steps."""

    def __init__(self) -> None:
        self._epoch = 0
        self._recent: deque[set[int]] = deque()  # the windows of a step each
        self._recent_set: set[int] = set()
        self._sample: set[int] = set()
        self._limit = _ALL

    def look(self, step: StepFacts) -> Iterator[Found]:
        if not len(step.windows):
            return
        if step.epoch != self._epoch:
            self._begin(step.epoch)
        ids = np.asarray(step.windows, dtype=np.int64)
        listed = ids.tolist()
        # Whole sets against whole sets, not a loop: 15 us for 8 windows, 200 for 512, a long step.
        now, sampled = set(listed), set(ids[_hashes(ids) <= self._limit].tolist())
        again = (now & self._recent_set) | (sampled & self._sample)
        if len(now) < len(listed):
            again |= {window for window in now if listed.count(window) > 1}
        self._remember(now - self._recent_set, sampled)
        if again:
            twice = [window for window in dict.fromkeys(listed) if window in again]
            yield Alarm(
                "data-repeated",
                f"windows came a second time in epoch {step.epoch}: {batch_ids(twice)}",
                "the data position was lost at a resume, or several ranks read the same share",
            )

    def _remember(self, now: set[int], sampled: set[int]) -> None:
        self._recent.append(now)
        self._recent_set |= now
        while len(self._recent) > 1 and len(self._recent_set) > _RECENT:
            self._recent_set -= self._recent.popleft()
        self._sample |= sampled
        while len(self._sample) > _SAMPLE:
            self._limit >>= 1
            kept = np.fromiter(self._sample, np.int64)
            self._sample = set(kept[_hashes(kept) <= self._limit].tolist())

    def _begin(self, epoch: int) -> None:
        self._epoch, self._limit = epoch, _ALL
        self._recent.clear()
        self._recent_set.clear()
        self._sample.clear()

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "limit": self._limit, "sample": sorted(self._sample)}

    def load(self, state: dict[str, Any]) -> None:
        self._begin(state["epoch"])
        self._limit, self._sample = state["limit"], set(state["sample"])


def _hashes(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """32 bits that have nothing to do with the order of the ids."""
    mixed = ids.astype(np.uint64) * _MULTIPLIER
    mixed ^= mixed >> _HALF
    mixed *= _MULTIPLIER
    return mixed >> _HALF


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

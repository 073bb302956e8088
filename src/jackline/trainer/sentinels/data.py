"""Sentinel of data seen twice within an epoch: a position lost at resume, two ranks with one share, a short loop.

Owns a memory of windows that stays small however long the epoch: the last few thousand exactly, so that a batch given
out twice is found at once, and of all before them a sample chosen by a hash of the window's id. The sample halves
itself when it is full, so it always spans the whole epoch: of a hundred million windows it knows one in 25,000, and a
repeated stretch of a few per cent cannot slip through it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jackline.trainer.sentinels.facts import Alarm, Found, StepFacts
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

"""Sentinel of sparse attention's gates: a layer in which one of the three ways to read has taken everything. Pure.

Looks at what nsa_method measures now and then; steps without those numbers say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jackline.trainer.sentinels.facts import Alarm, Found, StepFacts

_LOW_ENTROPY = 0.2  # ln 3 = 1.10 where all three weigh the same; above 0.5 is healthy
_HIGH_GATE = 0.9
_TIMES = 3  # one sequence may be odd
_BRANCHES = ("compressed", "selected", "window")


class CollapsedGates:
    """Three looks running: a gate that is closed learns nothing any more, so it does not come back by itself."""

    def __init__(self) -> None:
        self._times = 0
        self._since = 0

    def look(self, step: StepFacts) -> Iterator[Found]:
        entropy, largest = (step.values.get(name) for name in ("gate_entropy_least", "gate_max_most"))
        if entropy is None or largest is None:
            return
        if not (entropy < _LOW_ENTROPY or largest > _HIGH_GATE):  # nor if they are NaN: that is another sentinel's
            self._times = 0
            return
        self._since = step.step if not self._times else self._since
        self._times += 1
        if self._times >= _TIMES:
            yield Alarm("gates", self._text(step, entropy, largest), self._hint(), True)

    def _text(self, step: StepFacts, entropy: float, largest: float) -> str:
        shares = {name: step.values.get(f"gate_{name}", 0.0) for name in _BRANCHES}
        most = max(shares, key=lambda name: shares[name])
        number = int(step.values.get("gate_worst_layer", 0))
        where = f"layer {number}" if number else "a layer"
        return (
            f"the gates of {where} have collapsed: their entropy is {entropy:.2f} of {math.log(3):.2f}, one branch "
            f"gets {largest:.2f} of the weight; over all layers most goes to '{most}' ({shares[most]:.2f})"
        )

    def _hint(self) -> str:
        return (
            f"it was so at step {self._since:,} already: a lower lr or a longer warm-up from the start (--new), or "
            "from a checkpoint before that (`jackline resume --step N`, stop it, then --continue-with-changes)"
        )

    def state(self) -> dict[str, Any]:
        return {"times": self._times, "since": self._since}

    def load(self, state: dict[str, Any]) -> None:
        self._times, self._since = state["times"], state["since"]

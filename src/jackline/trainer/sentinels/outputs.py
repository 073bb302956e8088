"""Sentinels of a model's own outputs. Pure.

A model that predicts numbers: all predictions alike, and pairs learnt by heart. Sparse attention: a layer in which
one of the three branches has taken every gate; steps without those numbers say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jackline.trainer.sentinels.facts import Alarm, Found, PairFacts, StepFacts

_LEAST_ROWS = 20  # fewer tell nothing about their spread


class Collapse:
    """The guesses have hardly any spread, or only a handful of values. One of our seeds published a test file of
    23,961 rows with 9 different predictions, and nobody had noticed.

    Twice running: at the very start all guesses are the mean of the labels.
    """

    _TIMES = 2
    _SHARE_OF_SPREAD = 0.1
    _SHARE_OF_ROWS = 0.02

    def __init__(self) -> None:
        self._times = 0

    def look(self, facts: PairFacts) -> Iterator[Found]:
        if facts.num_rows < _LEAST_ROWS:
            return
        is_narrow = facts.spread < self._SHARE_OF_SPREAD * facts.wanted_spread
        is_few = facts.num_distinct < max(2, self._SHARE_OF_ROWS * facts.num_rows)
        self._times = self._times + 1 if is_narrow or is_few else 0
        if self._times >= self._TIMES:
            yield Alarm(
                "collapse",
                f"the predictions have collapsed: {facts.num_distinct:,} different ones for {facts.num_rows:,} pairs,"
                f" standard deviation {facts.spread:.3g} where the labels have {facts.wanted_spread:.3g}",
                "look at the embeddings (an encoder that got raw strings gives the same vector for all), at lr, and"
                " at labels of different scales in one table (--affinity_type takes one)",
                True,
            )

    def state(self) -> dict[str, Any]:
        return {"times": self._times}

    def load(self, state: dict[str, Any]) -> None:
        self._times = int(state["times"])


class Overfit:
    """The loss of validation pairs is more than three times that of training pairs, both without dropout."""

    _TIMES = 3.0

    def look(self, facts: PairFacts) -> Iterator[Found]:
        if facts.num_rows < _LEAST_ROWS or not facts.train_loss > 0:
            return
        ratio = facts.loss / facts.train_loss
        if ratio > self._TIMES:
            yield Alarm(
                "overfit",
                f"validation loss {facts.loss:.4g} is {ratio:.1f} times the training loss {facts.train_loss:.4g}",
                "the training pairs are being learnt by heart, or the validation antigens are unlike them: more"
                " dropout or weight_decay, fewer epochs, or --early_stopping",
            )

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        return


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

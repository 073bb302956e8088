"""Sentinels of a model that guesses numbers: all guesses alike, and pairs learnt by heart. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jackline.trainer.sentinels.facts import Alarm, Found, PairFacts

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

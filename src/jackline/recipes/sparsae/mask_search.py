"""Finding better masks during training: an evolution strategy that tries candidates, or SET, RigL, or none.

Owns one mask update: making candidates, judging each on a rotating set of validation batches without leaving a trace
in the weights, taking the best, and remembering what a later update needs. How masks change is `masks`; when
an update is due and what it costs is the recipe's. All chance is a function of (seed, update, candidate).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from jackline.recipes.sparsae.mask_sampling import seed_of
from jackline.recipes.sparsae.masks import Change, Masks

Method = Literal["es", "rigl", "set", "static"]


@dataclass(frozen=True)
class SearchSettings:
    """The seeds' constants; shares are of the active weights."""

    method: Method = "es"
    num_mutants: int = 3
    swap_share: float = 0.005
    reset_probability: float = 0.01
    boosted_reset_probability: float = 0.10
    boosted_updates: int = 2
    patience: int = 3
    drop_share: float = 0.3  # SET and RigL, falling to 0 along a cosine
    weight_ce: float = 1.0
    weight_diversity: float = 0.01
    weight_activity: float = 0.005
    anneal_share: float = 0.7  # of all updates, after which only the loss counts
    stats_rate: float = 0.1


@dataclass(frozen=True)
class Measured:
    """Of one candidate: loss, how unequal the layers' sparsities are, and how much gradient meets active weights."""

    ce: float
    diversity: float
    activity: float

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in (self.ce, self.diversity, self.activity))


@dataclass(frozen=True)
class Record:
    """One candidate as it is logged: one JSON line."""

    update: int
    candidate: int
    kind: str  # 'current', 'swap', 'reset', 'set' or 'rigl'
    flips: int
    ce: float | None
    diversity: float | None
    activity: float | None
    score: float | None
    is_taken: bool


def fade(update: int, planned: int, anneal_share: float) -> float:
    """(1 - r)^2 over the first `anneal_share` of all updates, then 0."""
    rate = min(1.0, update / max(1.0, anneal_share * planned))
    return (1.0 - rate) ** 2


def drop_share_at(update: int, planned: int, first: float) -> float:
    """RigL's: half a cosine from `first` to 0."""
    return first / 2 * (1 + math.cos(math.pi * min(1.0, update / max(1, planned))))


@dataclass
class Spread:
    """A running mean and mean absolute deviation, started by the first values seen and not by 0 and 1: a run has
    some ten updates, and from there a slow average would never arrive."""

    mean: float = 0.0
    deviation: float = 0.0
    has_begun: bool = False

    def begin(self, values: Iterable[float]) -> None:
        known = list(values)
        self.mean = sum(known) / len(known)
        self.deviation = sum(abs(value - self.mean) for value in known) / len(known)
        self.has_begun = True

    def follow(self, value: float, rate: float) -> None:
        self.deviation += rate * (abs(value - self.mean) - self.deviation)
        self.mean += rate * (value - self.mean)

    def z(self, value: float) -> float:
        return (value - self.mean) / (self.deviation + 1e-8)


@dataclass
class Stagnation:
    """Validation losses after each update; fires when the newest ones bring nothing. Needs `patience + 1` updates,
    so that it can fire within a run of ten."""

    patience: int
    history: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    boosted_left: int = 0

    def see(self, loss: float, boosted_updates: int) -> bool:
        before = list(self.history)
        self.history.append(loss)
        recent, earlier = [*before, loss][-self.patience :], [*before, loss][: -self.patience]
        is_stuck = bool(earlier) and min(recent) >= min(earlier)
        if is_stuck and not self.boosted_left:
            self.boosted_left = boosted_updates
            return True
        return False


class MaskSearch:
    """Holds what goes from update to update. `state_dict` belongs in the checkpoint."""

    def __init__(self, masks: Masks, settings: SearchSettings, *, seed: int, planned: int) -> None:
        self.masks = masks
        self.settings = settings
        self.seed = seed
        self.planned = planned
        self.num_updates = 0
        self.spreads = {name: Spread() for name in ("ce", "diversity", "activity")}
        self.stagnation = Stagnation(settings.patience)

    def update(
        self,
        evaluate: Callable[[int], float],
        gradients: Callable[[], Mapping[str, Tensor]],
        tensors: Mapping[str, Mapping[str, Tensor]],
    ) -> tuple[list[Record], Change]:
        """One mask update. `evaluate(update)` gives the loss of the network as it is now and leaves gradients, which
        `gradients()` hands out; `tensors` are the weights and what goes with each (moments, masters). Returns a
        record of every candidate and the change that was made, which may be none."""
        number, self.num_updates = self.num_updates, self.num_updates + 1
        if self.settings.method == "static":
            return [], {}
        if self.settings.method != "es":
            return self._drop_and_grow(number, evaluate, gradients, tensors)
        return self._evolve(number, evaluate, gradients, tensors)

    def _drop_and_grow(
        self,
        number: int,
        evaluate: Callable[[int], float],
        gradients: Callable[[], Mapping[str, Tensor]],
        tensors: Mapping[str, Mapping[str, Tensor]],
    ) -> tuple[list[Record], Change]:
        share = drop_share_at(number, self.planned, self.settings.drop_share)
        ce = evaluate(number)
        grads = gradients() if self.settings.method == "rigl" else None
        change = self.masks.drop_and_grow(share, seed_of(self.seed, number), grads)
        self.masks.take(change, tensors)
        flips = sum(part.count for part in change.values())
        known = ce if math.isfinite(ce) else None
        return [Record(number, 0, self.settings.method, flips, known, None, None, None, is_taken=True)], change

    def _evolve(
        self,
        number: int,
        evaluate: Callable[[int], float],
        gradients: Callable[[], Mapping[str, Tensor]],
        tensors: Mapping[str, Mapping[str, Tensor]],
    ) -> tuple[list[Record], Change]:
        """A candidate is drawn anew from its seed when it has won: only one is in memory at a time."""
        kinds = ["current", *(self._kind_of(number, mutant) for mutant in range(1, self.settings.num_mutants + 1))]
        measured, flips = [], []
        for candidate, kind in enumerate(kinds):
            change = self._make(kind, number, candidate)
            flips.append(sum(part.count for part in change.values()))
            with self.masks.tried(change):
                ce = evaluate(number)
                measured.append(self._measure(ce, gradients(), change))
            del change
        scores = self._score(number, measured)
        best = min(range(len(scores)), key=lambda index: scores[index])
        taken = self._make(kinds[best], number, best)
        self.masks.take(taken, tensors)
        self._learn(measured[best])
        if self.stagnation.boosted_left:
            self.stagnation.boosted_left -= 1
        records = [
            Record(
                number,
                index,
                kinds[index],
                flips[index],
                *_known(measured[index]),
                scores[index] if math.isfinite(scores[index]) else None,
                is_taken=index == best,
            )
            for index in range(len(kinds))
        ]
        return records, taken

    def _kind_of(self, number: int, candidate: int) -> str:
        settings = self.settings
        rng_state = settings.boosted_reset_probability if self.stagnation.boosted_left else settings.reset_probability
        return "reset" if (seed_of(self.seed, number, candidate, 1) % 10**6) / 10**6 < rng_state else "swap"

    def _make(self, kind: str, number: int, candidate: int) -> Change:
        seed = seed_of(self.seed, number, candidate)
        if kind == "reset":
            return self.masks.reshuffle(seed)
        return self.masks.swap(self.settings.swap_share, seed) if kind == "swap" else {}

    @torch.no_grad()
    def _measure(self, ce: float, gradients: Mapping[str, Tensor], change: Change) -> Measured:
        sparsities, activities = [], []
        overall = 1 - self.masks.num_active / sum(self.masks.sizes.values())
        counts = self.masks.counts()
        for name, gradient in gradients.items():
            flat, count = gradient.flatten(), counts[name]
            square = _energy(torch.where(self.masks.on[name].flatten(), flat, 0))
            if name in change:
                flips = change[name]
                square = square - _energy(flat[flips.off]) + _energy(flat[flips.on])
                count += flips.on.numel() - flips.off.numel()
            sparsities.append(1 - count / self.masks.sizes[name])
            activities.append(math.sqrt(max(0.0, float(square)) / max(1, count)))
        variance = sum((one - overall) ** 2 for one in sparsities) / max(1, len(sparsities))
        return Measured(ce, math.sqrt(variance + 1e-8), sum(activities) / max(1, len(activities)))

    def _score(self, number: int, measured: list[Measured]) -> list[float]:
        """Lowest wins; a candidate whose numbers are not finite never does, unless none is."""
        good = [one for one in measured if one.is_finite]
        if not good:
            return [0.0, *([math.inf] * (len(measured) - 1))]
        for name, spread in self.spreads.items():
            if not spread.has_begun:
                spread.begin(getattr(one, name) for one in good)
        faded = fade(number, self.planned, self.settings.anneal_share)
        weights = {
            "ce": self.settings.weight_ce,
            "diversity": self.settings.weight_diversity * faded,
            "activity": -self.settings.weight_activity * faded,
        }
        return [
            sum(weight * self.spreads[name].z(getattr(one, name)) for name, weight in weights.items())
            if one.is_finite
            else math.inf
            for one in measured
        ]

    def _learn(self, winner: Measured) -> None:
        if winner.is_finite:
            for name, spread in self.spreads.items():
                spread.follow(getattr(winner, name), self.settings.stats_rate)

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_updates": self.num_updates,
            "spreads": {name: asdict(spread) for name, spread in self.spreads.items()},
            "history": list(self.stagnation.history),
            "boosted_left": self.stagnation.boosted_left,
            "masks": self.masks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_updates = int(state["num_updates"])
        self.spreads = {name: Spread(**values) for name, values in state["spreads"].items()}
        self.stagnation.history = deque(state["history"], maxlen=64)
        self.stagnation.boosted_left = int(state["boosted_left"])
        self.masks.load_state_dict(state["masks"])


def _known(one: Measured) -> tuple[float | None, float | None, float | None]:
    values = (one.ce, one.diversity, one.activity)
    first, second, third = (value if math.isfinite(value) else None for value in values)
    return first, second, third


def _energy(values: Tensor) -> Tensor:
    """The sum of squares. Not square(): on a GPU its code takes 20 MB of the host's memory, a product's is there."""
    exact = values.float()
    return (exact * exact).sum()

"""What the affinity recipe trains and its validation judges: the pairs, the head over them, the best so far.

Owns a step's loss and the head's predictions. Built by build.py, trained as task.py says, judged by validation.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jackline.recipes.agab.batches import PairLoader, Pairs
from jackline.recipes.agab.head import focal_loss
from jackline.recipes.agab.mirror import EmbeddingMirror
from jackline.trainer.optim.learner import Learner

if TYPE_CHECKING:
    from jackline.recipes.agab.recipe import AgabConfig


@dataclass
class Best:
    """The best head so far by the full validation, and what it said of the quick pairs. Kept in the checkpoint, so
    that after a resume a model is compared with the same one."""

    predicted: Tensor
    num_stale: int = 0  # full validations at the ends of epochs since `reference` was reached
    reference: float | None = None  # the last Spearman that was a gain; the best may have crept a little above it

    def count(self, now: float | None, min_delta: float, *, is_epoch_end: bool) -> None:
        """One more full validation. Small gains add up to one; those in between two ends of epochs (more come where
        the validation pairs are few, or somebody asks) never bring the end nearer."""
        if now is not None and (self.reference is None or now > self.reference + min_delta):
            self.reference, self.num_stale = now, 0
        elif is_epoch_end:
            self.num_stale += 1

    def state_dict(self) -> dict[str, Any]:
        return {"predicted": self.predicted, "num_stale": self.num_stale, "reference": self.reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.predicted, self.num_stale = state["predicted"].clone(), int(state["num_stale"])
        self.reference = state.get("reference")


@dataclass(frozen=True)
class AffinityParts:
    """`totals` are rows of the statistics at the end."""

    config: AgabConfig
    learner: Learner
    pairs: Pairs
    loader: PairLoader
    total_steps: int
    mirror: EmbeddingMirror
    best: Best = field(default_factory=lambda: Best(torch.empty(0)))
    totals: dict[str, str] = field(default_factory=dict)

    def loss_sum(self, rows: Tensor) -> tuple[Tensor, int]:
        features, wanted = self.pairs.gather(rows)
        with self.learner.autocast():
            made = self.learner.model(features)
        return focal_loss(made, wanted, self.config.focal_gamma).sum(), len(rows)

    def predict(self, rows: Tensor) -> Tensor:
        """pKd of these pairs by the head as it stands; the caller sees to its mode."""
        with self.learner.autocast():
            made: Tensor = self.learner.model(self.pairs.gather(rows)[0])
        return made

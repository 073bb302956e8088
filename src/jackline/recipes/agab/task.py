"""The affinity recipe as the loop's task (`trainer.task.Task`): a step over pairs, and how pairs are counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from jackline.data.loader.batches import ToDevice
from jackline.recipes.agab.batches import PairBatch, PairLoader
from jackline.recipes.agab.head import count_parameters
from jackline.recipes.agab.parts import AffinityParts
from jackline.recipes.agab.validation import AffinityValidation
from jackline.trainer.optim.learner import Learner
from jackline.trainer.optim.schedule import Schedule
from jackline.trainer.planning.plan import Chosen, rehearsed
from jackline.trainer.report.console import Console
from jackline.trainer.task import Counting, PlainStep, Sums

if TYPE_CHECKING:
    from jackline.recipes.agab.recipe import AgabConfig


@dataclass(frozen=True)
class AffinityTask(PlainStep):
    """A sample is a pair: one row of features, one number to be guessed."""

    parts: AffinityParts
    schedule: Schedule
    chosen: Chosen

    @property
    def config(self) -> AgabConfig:
        return self.parts.config

    @property
    def learner(self) -> Learner:
        return self.parts.learner

    @property
    def loader(self) -> PairLoader:
        return self.parts.loader

    @property
    def total_steps(self) -> int:
        return self.parts.total_steps

    @property
    def counting(self) -> Counting:
        flops_each = 6.0 * count_parameters(self.parts.pairs.num_inputs)
        return Counting(unit="pairs", per_step=self.config.batch_size, flops_each=flops_each)

    def with_micro_batch(self, micro_batch: int) -> Self:
        return replace(self, chosen=rehearsed(self.config, micro_batch))

    def close(self) -> None:
        self.loader.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    def on_device(self, batch: PairBatch, to_device: ToDevice) -> Tensor:
        return batch.rows

    def count_of(self, batch: PairBatch) -> int:
        return len(batch.windows)  # the last of an epoch may be short

    def loss_sum(self, rows: Tensor) -> tuple[Tensor, int]:
        return self.parts.loss_sum(rows)

    def update(self) -> Tensor:
        return self.learner.update()

    # -- around the steps --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"best_head": self.parts.best}

    def make_validation(self, console: Console, window_s: float) -> AffinityValidation:
        return AffinityValidation(self.parts, console)

    def blank_batch(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.learner.device)

    def eval_sum(self, rows: Tensor) -> Sums:
        return Sums(*self.parts.loss_sum(rows))

    def tokens_between(self, first_step: int, step: int) -> int:
        return self.loader.pairs_until(step) - self.loader.pairs_until(first_step)

    def place_text(self) -> str:
        place = self.loader.place()
        of = f"/{place['epochs']}" if place.get("epochs") else ""
        return f"(epoch {place['epoch']}{of}, batch {place['batch']:,}/{place['num_batches']:,})"

    def totals(self) -> dict[str, str]:
        return self.parts.totals

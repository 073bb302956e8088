"""A language model over a corpus as the loop's task, and the places where a recipe adds to its plain step.

Owns what a step of it is. `build.py` makes one; which micro-batch, precision or compiler is right is decided there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from jackline.data.loader.batches import ToDevice
from jackline.data.loader.loader import Batch
from jackline.models.loss import IGNORED
from jackline.trainer.chat import split_answers
from jackline.trainer.config import TrainConfig
from jackline.trainer.corpus import Corpus
from jackline.trainer.network import Shape
from jackline.trainer.optim.learner import Learner
from jackline.trainer.optim.schedule import Schedule
from jackline.trainer.own.samples import SampleBatch, move
from jackline.trainer.planning.plan import Chosen, rehearsed
from jackline.trainer.report.console import Console
from jackline.trainer.report.flops import flops_per_token
from jackline.trainer.startup.parallel import share_of
from jackline.trainer.startup.precision import Attention, attention_kernels
from jackline.trainer.task import BatchSource, Between, Counting, Sums
from jackline.trainer.validate.evaluate import TextWindows
from jackline.trainer.validate.validation import Validation


class Additions(Protocol):
    """What a recipe adds to the plain step: a few places in the loop, each with a name. A recipe's own class inherits
    from this and has only those that it needs.

    begin_step     the step's number, before its gradients
    loss_sum       of a slice: summed loss and over how many targets
    before_update  gradients are there, not yet clipped
    after_update   weights have moved; what follows them (averages) follows here
    after_step     between two steps: anything that takes long, told through `between.tell`
    """

    hardest_step: int = 0  # the first step that needs as much memory as any
    can_be_divided: bool = False  # it does not read or change weights itself, so each rank may hold a part of them

    def bind(self, task: LanguageTask) -> None:
        """Once, when model, optimizer and data are there."""
        return

    def state(self) -> dict[str, Any]:
        """What belongs in the checkpoint beside model and optimizer, by name."""
        return {}

    def begin_step(self, step: int) -> None:
        """`step` whole steps were done before."""
        return

    def loss_sum(self, model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return model(ids, targets), targets.numel()

    def before_update(self) -> None:
        """Gradients are there, unscaled."""
        return

    def after_update(self) -> None:
        """Weights have moved, gradients are still there."""
        return

    def after_step(self, between: Between) -> None:
        """Not after a step that the fp16 scaler skipped."""
        return

    def metrics(self) -> dict[str, float | Tensor]:
        """Of the last step, for the curves."""
        return {}

    def totals(self) -> dict[str, str]:
        """Rows for the statistics at the end."""
        return {}


class NoAdditions(Additions):
    """The plain step."""

    can_be_divided = True


@dataclass(frozen=True)
class LanguageTask:
    """`loss_sum` and `update` are the two halves of a step. The contract is `task.Task`."""

    config: TrainConfig
    learner: Learner
    corpus: Corpus
    loader: BatchSource
    shape: Shape
    attention: Attention
    chosen: Chosen
    schedule: Schedule
    total_steps: int
    additions: Additions

    @cached_property
    def counting(self) -> Counting:
        config = self.config
        return Counting(
            unit="tokens",
            per_step=config.batch_size * config.seq_len,
            flops_each=flops_per_token(self.shape, config.seq_len),
            vocab_size=self.shape.vocab_size,
        )

    def with_micro_batch(self, micro_batch: int) -> Self:
        return replace(self, chosen=rehearsed(self.config, micro_batch))

    def kernels(self) -> AbstractContextManager[Any]:
        """The attention kernels, for as long as the block runs."""
        return attention_kernels(self.attention)

    def close(self) -> None:
        try:
            self.loader.close()
        finally:
            self.corpus.close()

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        self.additions.begin_step(step)

    def on_device(self, batch: Batch | SampleBatch, to_device: ToDevice) -> Any:
        if isinstance(batch, SampleBatch):
            return move(share_of(batch.given), self.learner.device)
        return to_device(share_of(batch.tokens))

    def count_of(self, batch: Batch | SampleBatch) -> int | None:
        """Answers are counted by the loss."""
        return None if self.config.chat else self.config.batch_size * self.config.seq_len

    def loss_sum(self, tokens: Tensor) -> tuple[Tensor, int]:
        """Of a slice of windows of seq_len + 1 tokens."""
        ids, targets = self._split(tokens)
        with self.learner.autocast():
            total, count = self.additions.loss_sum(self.learner.model, ids, targets)
        return total, int((targets != IGNORED).sum()) if self.config.chat else count

    def _split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return split_answers(tokens) if self.config.chat else (tokens[:, :-1], tokens[:, 1:])

    def update(self) -> Tensor:
        self.learner.unscale()
        self.additions.before_update()
        norm = self.learner.move_weights()
        self.additions.after_update()
        self.learner.forget_gradients()
        return norm

    def metrics(self) -> dict[str, float | Tensor]:
        return self.additions.metrics()

    def after_step(self, between: Between) -> None:
        self.additions.after_step(between)

    # -- around the steps --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return self.additions.state()

    def make_validation(self, console: Console, window_s: float) -> Validation:
        data = self.corpus.validation
        if self.config.chat:
            return Validation(self, self.corpus.held, console, window_s)
        return Validation(self, None if data is None else TextWindows(data, self.config.seq_len), console, window_s)

    @property
    def hardest_step(self) -> int:
        return self.additions.hardest_step

    def blank_batch(self, count: int) -> Tensor:
        return torch.zeros((count, self.config.seq_len + 1), dtype=torch.long, device=self.learner.device)

    def eval_sum(self, tokens: Tensor) -> Sums:
        """Never compiled: another shape and another mode would be compiled anew, for half a minute."""
        (ids, targets), model = self._split(tokens), self.learner.model
        count = int((targets != IGNORED).sum()) if self.config.chat else targets.numel()
        call = model.forward if model._compiled_call_impl is not None else model  # fully_shard needs its hooks
        with self.learner.autocast():
            return Sums(call(ids, targets), count)

    def tokens_between(self, first_step: int, step: int) -> int:
        return (step - first_step) * self.counting.per_step

    def place_text(self) -> str:
        return ""

    def totals(self) -> dict[str, str]:
        return self.additions.totals()

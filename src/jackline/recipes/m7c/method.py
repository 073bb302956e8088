"""The plain step, and now and then what gates and selection of sparse attention do.

Owns when that is looked at: every `stats_every` steps, by a forward pass of its own over one sequence of the batch
just trained on, outside of compiled code and without gradients. That pass waits for the GPU; no other step does.
What goes wrong in it ends the looking and not the training.
"""

from __future__ import annotations

from torch import Tensor, nn

from jackline.checkpoint.shards import is_distributed
from jackline.models.nsa.model import NSAModel
from jackline.trainer.language import Additions, LanguageTask
from jackline.trainer.task import Between


def is_due(step: int, every: int) -> bool:
    """Whether step number `step`, counted from 1, is looked at: the first, and then every so many."""
    return every > 0 and (step == 1 or step % every == 0)


class AttentionStatistics(Additions):
    can_be_divided = True

    def __init__(self, stats_every: int) -> None:
        self._every = stats_every
        self._step = 0
        self._row: Tensor | None = None
        self._found: dict[str, float] = {}
        self._trouble = ""

    def bind(self, task: LanguageTask) -> None:
        self._learner = task.learner
        if is_distributed(next(task.learner.model.parameters())):
            self._every, self._trouble = 0, "the weights are divided over ranks (parallel=fsdp)"

    def begin_step(self, step: int) -> None:
        self._step, self._found = step + 1, {}

    def loss_sum(self, model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        self._row = ids[:1]
        return super().loss_sum(model, ids, targets)

    def after_update(self) -> None:
        """Before the step is logged, so that its numbers carry its own step."""
        model = self._learner.model
        if self._row is None or not is_due(self._step, self._every) or not isinstance(model, NSAModel):
            return
        try:
            with self._learner.autocast():
                self._found = model.statistics(self._row)
        except Exception as problem:  # most likely no room for it
            words = str(problem).strip().splitlines()
            self._every, self._trouble = 0, f"{type(problem).__name__}: {words[0] if words else ''}"

    def after_step(self, between: Between) -> None:
        if self._trouble:
            between.tell(f"gates and blocks are not looked at any more, the training continues: {self._trouble}")
            self._trouble = ""

    def metrics(self) -> dict[str, float | Tensor]:
        return dict(self._found)

"""How a recipe builds what it trains: methods of its settings, each with a default that every language model has.

No torch here: a command line resolves settings without it. A recipe's own method imports what it needs inside.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn

    from jackline.memory.plan.cards import Precision
    from jackline.memory.predict.job import Job
    from jackline.trainer.corpus import TrainText
    from jackline.trainer.language import Additions
    from jackline.trainer.network import Shape
    from jackline.trainer.report.console import Console
    from jackline.trainer.task import Task


class RecipeHooks(Protocol):
    """None means: as for every language model (build.py)."""

    def make_task(self, console: Console, folder: Path) -> Task | None:
        """All of the training, for what is no language model."""
        return None

    def make_additions(self, model: nn.Module) -> Additions | None:
        """What is added to the plain step of a language model; before the optimizer is made."""
        return None

    def open_text(self, console: Console) -> TrainText | None:
        """The text to train on, where it is not windows of a cache. There is no validation on it then."""
        return None

    def memory_job(self, shape: Shape, precision: Precision) -> Job | None:
        """What a step needs, for the memory plan, where it is more than the plain step of a language model."""
        return None

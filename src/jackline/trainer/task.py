"""What a recipe does to the plain step: four places in the loop, each with a name. No list of callbacks, one object.

    begin_step     the step's number, before its gradients
    loss_sum       of a slice: summed loss and over how many targets
    before_update  gradients are there, not yet clipped
    after_update   weights have moved; what follows them (averages) follows here
    after_step     between two steps: anything that takes its time, told through `tell`

A recipe names its module in `METHOD` of its config; the module has `make_method(model, config)` and, when it needs
more memory than the plain step, `job_of(config, shape, precision)`. One that trains no language model has
`build_parts(config, console, folder)` and `make_validation(parts, console, window_s)` in their place. This one is the
plain method: nothing added.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from jackline.trainer.build import Parts
    from jackline.trainer.config import TrainConfig

Tell = Callable[[str], None]


def _nothing_to_tell(text: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Between:
    """What `after_step` may use: steps done, where the run lies, and a console. `during` names what takes its time."""

    step: int
    folder: Path
    tell: Tell
    seconds: float  # since the attempt's first step
    loss: Tensor  # of the step, on its device: reading it waits
    during: Callable[[str], AbstractContextManager[None]] = _nothing_to_tell


class Method:
    """The plain one, and what others begin with."""

    hardest_step: int = 0  # the first step that needs as much memory as any

    def bind(self, parts: Parts) -> None:
        """Once, when model, optimizer and data are there."""

    def state(self) -> dict[str, Any]:
        """What belongs in the checkpoint beside model and optimizer, by name."""
        return {}

    def begin_step(self, step: int) -> None:
        """`step` whole steps were done before."""

    def loss_sum(self, model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return model(ids, targets), targets.numel()

    def before_update(self) -> None: ...

    def after_update(self) -> None: ...

    def after_step(self, between: Between) -> None: ...

    def metrics(self) -> dict[str, float | Tensor]:
        """Of the last step, for the curves."""
        return {}

    def totals(self) -> dict[str, str]:
        """Rows for the statistics at the end."""
        return {}


def find_method(config: TrainConfig) -> Any:
    """The module that a recipe's config names."""
    return importlib.import_module(config.METHOD)


def make_method(model: nn.Module, config: TrainConfig) -> Method:
    return Method()

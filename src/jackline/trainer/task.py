"""What the loop asks of a task, whatever it trains: `Task`, and the small types that go with it.

A recipe's settings build one (`TrainConfig.make_task`). Three there are: `LanguageTask` (language.py), a language
model over a corpus, which most recipes extend by `Additions`; `OwnTask` (own/task.py), a person's `jackline.Recipe`;
and the affinity recipe's own. Owns the contract alone, and nothing of how it is fulfilled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import Tensor

from jackline.data.loader.batches import ToDevice
from jackline.errors import UsageError
from jackline.trainer.optim.learner import Learner
from jackline.trainer.optim.schedule import Schedule

if TYPE_CHECKING:
    from jackline.session.off import OffRun
    from jackline.session.run import Run
    from jackline.trainer.config import TrainConfig
    from jackline.trainer.planning.plan import Chosen
    from jackline.trainer.report.console import Console
    from jackline.trainer.report.watch import Watch
    from jackline.trainer.sentinels.floor import Floor
    from jackline.trainer.validate.evaluate import Evaluation

Tell = Callable[[str], None]


class BatchSource(Protocol):
    """Batches in an order that can be seeked. A batch has at least `epoch` and `windows`, the ids of its samples."""

    @property
    def waited_s(self) -> float:
        """For data, in all."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state(self) -> dict[str, Any]: ...
    def seek(self, state: dict[str, Any]) -> None: ...
    def num_windows(self) -> int | None:
        """All samples there are; None where that is not known."""

    def close(self) -> None: ...


def check_patience(*, has_validation: bool) -> None:
    if not has_validation:
        raise UsageError("patience counts validations, and this training has none", hint="patience=0")


class Ending:
    """The batches of another source, until `end_here` was called; kept in checkpoints."""

    def __init__(self, inner: BatchSource) -> None:
        self._inner = inner
        self._is_ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def waited_s(self) -> float:
        return self._inner.waited_s

    @property
    def is_exhausted(self) -> bool:
        return self._is_ended or bool(getattr(self._inner, "is_exhausted", False))

    def end_here(self) -> None:
        """No further batch: the run is complete after this step, and stays so after a resume."""
        self._is_ended = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_ended:
            raise StopIteration
        return next(self._inner)

    def state(self) -> dict[str, Any]:
        return {**self._inner.state(), "is_ended": self._is_ended}

    def seek(self, state: dict[str, Any]) -> None:
        self._is_ended = bool(state.get("is_ended", False))
        self._inner.seek({name: value for name, value in state.items() if name != "is_ended"})

    def num_windows(self) -> int | None:
        return self._inner.num_windows()

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class Counting:
    """What a step is counted in, for rates, alarms and plans."""

    unit: str  # "tokens"
    per_step: int
    flops_each: float  # of a training step, for one of the unit
    vocab_size: int = 0  # 0: nothing is guessed out of a vocabulary
    is_any_loss: bool = False  # a loss below 0 is no mistake


@dataclass(frozen=True)
class Sums:
    """Of a validation batch: the summed loss over `count` targets, and other numbers summed over its samples."""

    loss: Tensor
    count: int
    more: Mapping[str, Tensor] = field(default_factory=dict)


def _nothing_to_tell(text: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Between:
    """What `after_step` may use: steps done, the run's folder, and the console. `during` names what takes long."""

    step: int
    folder: Path
    tell: Tell
    seconds: float  # since the attempt's first step
    loss: Tensor  # of the step, on its device: reading it waits
    during: Callable[[str], AbstractContextManager[None]] = _nothing_to_tell


class Task(Protocol):
    """One training, built. In the order in which the loop asks."""

    @property
    def config(self) -> TrainConfig: ...
    @property
    def learner(self) -> Learner: ...
    @property
    def loader(self) -> BatchSource: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def counting(self) -> Counting: ...
    @property
    def chosen(self) -> Chosen:
        """The micro-batch, and why."""

    def with_micro_batch(self, micro_batch: int) -> Self:
        """The same, in slices of another size: what a rehearsal found to fit."""

    def kernels(self) -> AbstractContextManager[Any]:
        """Held open while the task trains."""

    def close(self) -> None: ...

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """`step` whole steps were done before."""

    def on_device(self, batch: Any, to_device: ToDevice) -> Any:
        """What slices are taken of: a tensor, or tensors with one row a sample."""

    def count_of(self, batch: Any) -> int | None:
        """What the summed loss of a batch is divided by; None: by what `loss_sum` has counted in its slices."""

    def loss_sum(self, given: Any) -> tuple[Tensor, int]:
        """Of a slice: the summed loss, and over how many targets."""

    def update(self) -> Tensor:
        """The optimizer's step from the gradients there are; returns their norm before it was clipped."""

    def metrics(self) -> dict[str, float | Tensor]:
        """Of the last step, for the curves."""

    def after_step(self, between: Between) -> None:
        """Between two steps: whatever takes long."""

    # -- around the steps --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What belongs in the checkpoint beside model, optimizer and loader, by name."""

    def make_validation(self, console: Console, window_s: float) -> Validating:
        """`window_s`: what the rehearsal measured for one sample; 0 when there was none."""

    @property
    def hardest_step(self) -> int:
        """The first step that needs as much memory as any: the one that is rehearsed."""

    def blank_batch(self, count: int) -> Any:
        """As large as `count` samples are, for a rehearsal."""

    def eval_sum(self, given: Any) -> Sums:
        """`loss_sum` without gradients and without what is added for training, and what else is measured."""

    def tokens_between(self, first_step: int, step: int) -> int:
        """How much the steps from one to another have read, in the unit of `counting`."""

    def place_text(self) -> str:
        """Which epoch it is, where steps alone do not tell what a person counts in."""

    def totals(self) -> dict[str, str]:
        """Rows for the statistics at the end."""


class PlainStep(Protocol):
    """The parts of a `Task` where every step is the same and nothing happens between two of them. It uses no
    attribute of the task: a dataclass would take an inherited property for the default of its field."""

    def kernels(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin_step(self, step: int) -> None:
        return  # every step is the same

    def metrics(self) -> dict[str, float | Tensor]:
        return {}

    def after_step(self, between: Between) -> None:
        return

    def state(self) -> dict[str, Any]:
        return {}

    @property
    def hardest_step(self) -> int:
        return 0

    def totals(self) -> dict[str, str]:
        return {}


class Validating(Protocol):
    """When a task is validated and what is best so far, during one attempt."""

    num_windows: int  # samples of a full validation
    num_quick: int  # of a quick one

    @property
    def num_parts(self) -> int:
        """Batches of a full validation."""

    def floor(self) -> Floor | None:
        """Below which no honest loss can be, where the data tell."""

    def after_step(self, run: Run | OffRun, watch: Watch, before: int, request: Path) -> None:
        """What is due: by its interval, or because the file `request` asks for a full one."""

    def finish(self, run: Run | OffRun, watch: Watch, folder: Path) -> Evaluation | None:
        """After the last step."""

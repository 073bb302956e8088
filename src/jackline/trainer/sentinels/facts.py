"""What the sentinels are told, and what they answer. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jackline.trainer.optim.schedule import Schedule
from jackline.trainer.sentinels.floor import Floor


@dataclass(frozen=True)
class Facts:
    """What holds for the whole run. Without a floor only a loss below 0 is impossible. Without a vocabulary the loss
    is no cross-entropy: it has no ln(V) to begin at, and a few odd samples may be most of it."""

    vocab_size: int
    schedule: Schedule | None = None
    tokens_per_step: int = 1
    floor: Floor | None = None
    is_any_loss: bool = False  # a loss below 0 is no mistake
    unit: str = "tokens"  # what `tokens_per_step` and rates count
    full_validation_parts: int | None = None  # as many as a full validation has, where the quick one has fewer


@dataclass(frozen=True)
class StepFacts:
    """One optimizer step. `step` counts from 1: it is the number of steps done with this one. None: not known.

    `seconds` and `tokens_per_s` are of this step (or the mean since the last one that is looked at); `saved_s` and
    `waited_s` are parts of `seconds`. `windows` are the ids of the global batch's windows (data.Batch.windows).
    """

    step: int
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_s: float | None = None
    data_wait_share: float | None = None
    seconds: float | None = None
    saved_s: float = 0.0
    memory_bytes: int | None = None
    micro_batch: int | None = None
    epoch: int = 0
    windows: Sequence[int] = ()
    is_skipped: bool = False  # the fp16 scaler found infinite gradients and did not step, which is its way
    values: Mapping[str, float] = field(default_factory=dict)  # of the recipe's own, by name


@dataclass(frozen=True)
class PairFacts:
    """One validation of a model that guesses numbers. `spread` is the standard deviation of its guesses; both losses
    are without dropout."""

    num_rows: int
    num_distinct: int
    spread: float
    wanted_spread: float
    loss: float
    train_loss: float


@dataclass(frozen=True)
class EvalFacts:
    """One validation: the mean loss of each part (an evaluation batch, all of the same size), in a fixed order."""

    step: int
    losses: Sequence[float]
    tokens_per_part: int = 1
    is_subset: bool = True
    pairs: PairFacts | None = None


@dataclass(frozen=True)
class Alarm:
    """`is_fatal`: continuing makes it worse; stops with sentinels=stop. `is_ruin`: the weights are gone, and every
    save from now on would push a good checkpoint out; stops unless sentinels=off."""

    kind: str
    text: str
    hint: str
    is_fatal: bool = False
    is_ruin: bool = False
    step: int = 0  # known when it is said


Found = Alarm  # before it is known at which step it is said


@dataclass(frozen=True)
class Surroundings:
    """What else happens on the machine. Counters grow; two readings are compared. None: cannot be read here."""

    at_s: float
    others_cpu_s: float | None = None  # CPU time of all other processes of the machine
    queued_s: float | None = None  # time in which threads of this process wanted a CPU and did not get one
    gpu_clock_share: float | None = None  # of its highest
    gpu_slowdown: str = ""  # 'too hot', 'power cap' ... as the driver says
    gpu_others: tuple[str, ...] = ()  # other processes on the GPU
    allocator_retries: int | None = None  # of the caching allocator: cudaMalloc failed, caches were flushed
    swapped_bytes: int | None = None  # of this process


class Rule(Protocol):
    """One sentinel."""

    def look(self, step: StepFacts) -> Iterator[Found]: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...

"""Validation: the same windows each time, in the same order, without a trace in the training.

Owns which windows a quick validation takes (a fixed share, spread over the set by a fixed shuffle) and the mean over
them. Leaves the random numbers of the training alone. What is best, and what is done about it, is the loop's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from jackline.data.build.supply import Data
from jackline.data.loader.batches import ToDevice
from jackline.data.loader.loader import Loader, LoaderSettings
from jackline.memory.guard.oom import is_out_of_memory
from jackline.memory.guard.safe_step import free_caches
from jackline.memory.guard.step_state import seeded
from jackline.trainer.sentinels.floor import Floor, entropy_floor
from jackline.trainer.task import Task

Advance = Callable[[int], bool]
_SEED = 1  # of the shuffle: never the run's own, so that two runs are validated alike
_FLOOR_TOKENS = 1 << 16


class ValidationSet(Protocol):
    """What a task is validated on: the same samples in the same order each time."""

    unit: str  # 'windows', for people
    num_windows: int  # all there are
    tokens_each: int  # of a window, in the unit of the task's counting
    why_empty: str  # what to say where there are none

    def read(self, batch_size: int, count: int, device: torch.device) -> Iterator[tuple[Any, int]]:
        """Batches on the device with their sizes, the first `count` windows of the fixed order."""

    def floor(self) -> Floor | None:
        """Below which no honest loss can be, where the data tell."""


class TextWindows:
    """Windows of a text's validation split."""

    unit = "windows"

    def __init__(self, data: Data, seq_len: int) -> None:
        self._data, self._seq_len = data, seq_len
        self.tokens_each = seq_len
        self.num_windows = count_windows(data, seq_len)
        self.why_empty = (
            f"the validation set is shorter than one window of {seq_len} tokens: no validation; "
            "a larger val_fraction, or split_by=lines for a few long text files"
        )

    def read(self, batch_size: int, count: int, device: torch.device) -> Iterator[tuple[Any, int]]:
        to_device = ToDevice(device)
        for windows in read_windows(self._data, self._seq_len, batch_size, count):
            yield to_device(windows), len(windows)

    def floor(self) -> Floor | None:
        """From validation windows: reading training windows here would move the loader."""
        wanted = min(self.num_windows, max(1, _FLOOR_TOKENS // self._seq_len))
        windows = read_windows(self._data, self._seq_len, min(64, wanted), wanted)
        sample = [tokens[:, :-1].reshape(-1) for tokens in windows]
        return entropy_floor(np.concatenate(sample), self._data.cache.meta.vocab_size)


@dataclass(frozen=True)
class Evaluation:
    """Mean loss (in nats a token); `losses` are the means of each batch, in order, `more` other means by name."""

    loss: float
    losses: tuple[float, ...]
    num_windows: int
    tokens_per_part: int
    more: Mapping[str, float] = field(default_factory=dict)


def count_windows(data: Data, seq_len: int) -> int:
    with _reader(data, seq_len, 1) as loader:
        return loader.num_windows() or 0


def subset_size(num_windows: int, share: float) -> int:
    """At least one window; all with share 1."""
    return max(1, min(num_windows, math.ceil(num_windows * share)))


def evaluate(
    task: Task, data: ValidationSet, num_windows: int, batch_size: int, advance: Advance
) -> Evaluation | None:
    """Over the first `num_windows` of the fixed order. `advance(n)` is told of n more; None when it says to give up.

    A batch that does not fit is halved and all is done again: a mean over other batches is another number in its
    last bits, and two validations must be comparable.
    """
    while True:
        try:
            return _evaluate(task, data, num_windows, batch_size, advance)
        except RuntimeError as error:
            if not is_out_of_memory(error) or batch_size == 1:
                raise
        batch_size = max(1, batch_size // 2)
        free_caches()


def _evaluate(
    task: Task, data: ValidationSet, num_windows: int, batch_size: int, advance: Advance
) -> Evaluation | None:
    model, device = task.learner.model, task.learner.device
    sums: list[torch.Tensor] = []
    counts: list[int] = []
    more: dict[str, list[torch.Tensor]] = {}
    was_training = model.training
    model.eval()
    try:
        # A loss may draw (noise of a diffusion model): the same numbers in every validation, none of the training's.
        with torch.no_grad(), task.kernels(), seeded(_SEED):
            for given, size in data.read(batch_size, num_windows, device):
                found = task.eval_sum(given)
                sums.append(found.loss.double())
                counts.append(found.count)
                for name, value in found.more.items():
                    more.setdefault(name, []).append(value.double())
                if not advance(size):
                    return None
    finally:
        model.train(was_training)
    totals = torch.stack(sums).tolist()
    losses = tuple(total / count for total, count in zip(totals, counts, strict=True))
    means = {name: sum(torch.stack(values).tolist()) / num_windows for name, values in more.items()}
    return Evaluation(sum(totals) / sum(counts), losses, num_windows, batch_size * data.tokens_each, means)


def read_windows(data: Data, seq_len: int, batch_size: int, num_windows: int) -> Iterator[NDArray[np.generic]]:
    """Batches of the fixed order, the last one cut to size."""
    left = num_windows
    with _reader(data, seq_len, batch_size) as loader:
        for batch in loader:
            yield batch.tokens[:left]
            left -= len(batch.tokens)
            if left <= 0:
                return


def _reader(data: Data, seq_len: int, batch_size: int) -> Loader:
    settings = LoaderSettings(seq_len=seq_len, batch_size=batch_size, seed=_SEED, epochs=1, drop_last=False)
    return Loader(data, settings)

"""Validation: the same windows each time, in the same order, without a trace in the training.

Owns which windows a quick validation takes (a fixed share, spread over the set by a fixed shuffle) and the mean over
them. Draws no random numbers. What is best, and what is done about it, is the loop's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from jackline.data.build.supply import Data
from jackline.data.loader.batches import ToDevice
from jackline.data.loader.loader import Loader, LoaderSettings
from jackline.memory.guard.oom import is_out_of_memory
from jackline.memory.guard.safe_step import free_caches
from jackline.trainer.task import Task

Advance = Callable[[int], bool]
_SEED = 1  # of the shuffle: never the run's own, so that two runs are validated alike


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats a token; `losses` are the means of each batch, in order."""

    loss: float
    losses: tuple[float, ...]
    num_windows: int
    tokens_per_part: int


def count_windows(data: Data, seq_len: int) -> int:
    with _reader(data, seq_len, 1) as loader:
        return loader.num_windows() or 0


def subset_size(num_windows: int, share: float) -> int:
    """At least one window; all with share 1."""
    return max(1, min(num_windows, math.ceil(num_windows * share)))


def evaluate(task: Task, data: Data, num_windows: int, batch_size: int, advance: Advance) -> Evaluation | None:
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


def _evaluate(task: Task, data: Data, num_windows: int, batch_size: int, advance: Advance) -> Evaluation | None:
    to_device, model = ToDevice(task.learner.device), task.learner.model
    sums: list[torch.Tensor] = []
    counts: list[int] = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), task.kernels():
            for windows in read_windows(data, task.config.seq_len, batch_size, num_windows):
                total, count = task.eval_sum(to_device(windows))
                sums.append(total.double())
                counts.append(count)
                if not advance(len(windows)):
                    return None
    finally:
        model.train(was_training)
    totals = torch.stack(sums).tolist()
    losses = tuple(total / count for total, count in zip(totals, counts, strict=True))
    return Evaluation(sum(totals) / sum(counts), losses, num_windows, batch_size * task.config.seq_len)


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

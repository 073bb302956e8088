"""The seekable order: a keyed permutation of a dataset, any batch of any epoch in O(1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jackline.data.loader.order import Blocks, Permutation, mix
from jackline.errors import UsageError

Place = tuple[int, Any]  # epoch, and the indices passed to the dataset


class SeekableBatches:
    """Batches from a keyed permutation of the whole dataset, or in plain order. Yields (epoch, indices).

    `data` is asked for its length when an epoch begins: it may grow between epochs.
    """

    def __init__(self, data: Any, batch_size: int | None, *, is_shuffled: bool, drop_last: bool, seed: int) -> None:
        self._data = data
        self.batch_size = batch_size
        self.is_shuffled = is_shuffled
        self.drop_last = drop_last
        self.seed = seed
        self._epoch = 0
        self._start = 0
        self._rank, self._num_ranks = 0, 1

    def divide(self, rank: int, num_ranks: int, *, is_per_rank: bool) -> None:
        """Yield only one rank's share of each batch. `is_per_rank`: the batch size given was that of one rank."""
        self._rank, self._num_ranks = rank, num_ranks
        assert self.batch_size is not None
        self.batch_size *= num_ranks if is_per_rank else 1
        last = 0 if self.drop_last else self.num_samples % self.batch_size
        for count, which in ((self.batch_size, "a batch"), (last, "the last batch of an epoch")):
            if count % num_ranks:
                raise UsageError(
                    f"{which} has {count} samples, which {num_ranks} ranks cannot share equally",
                    hint="choose a batch_size that is a multiple of the number of ranks, and drop_last=True",
                )

    @property
    def num_samples(self) -> int:
        return len(self._data)

    def __len__(self) -> int:
        return self._count(self.num_samples)

    def seek(self, epoch: int, start: int) -> None:
        """Make the next pass that of `epoch`, starting at batch `start`."""
        self._epoch, self._start = epoch, start

    def set_epoch(self, epoch: int) -> None:
        """For frameworks that count epochs themselves."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Place]:
        epoch, size, num_samples = self._epoch, self.batch_size or 1, self.num_samples
        blocks = None
        if self.is_shuffled and num_samples:
            blocks = Blocks(Permutation(num_samples, mix(self.seed, epoch)))
        for number in range(self._start, self._count(num_samples)):
            first = number * size
            count = min(size, num_samples - first)
            if blocks is not None:
                indices = blocks.take(first, count).tolist()
            else:
                indices = list(range(first, first + count))
            share = len(indices) // self._num_ranks
            indices = indices[self._rank * share : (self._rank + 1) * share]
            yield epoch, indices if self.batch_size is not None else indices[0]

    def _count(self, num_samples: int) -> int:
        size = self.batch_size or 1
        return num_samples // size if self.drop_last else -(-num_samples // size)

"""The loader that transformers' Trainer iterates: whole batches from one of Jackline's feeds.

Trainer resumes by discarding the first batches of an epoch. It is given placeholders for those, so no data is read
for them: the feed has been positioned behind them. Owns that loader and nothing of the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from jackline.session.feeds.feed import END, length_of
from jackline.session.feeds.place import HandedOut


class FedBatches(IterableDataset[Any]):
    """Batches of the epoch that `batches` is at, in this process; the workers are behind the feed."""

    def __init__(self, batches: HandedOut, num_samples: int | None) -> None:
        self.batches = batches
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches.open(self.batches.epoch)):
            yield None
        while (batch := self.batches.take()) is not END:
            yield batch


class SizedFedBatches(FedBatches):
    """The same, of a feed that knows its length."""

    def __len__(self) -> int:
        return self.batches.feed.num_batches or 0


def make_loader(batches: HandedOut, loader: Any) -> DataLoader[Any]:
    """A loader for Trainer in place of `loader`. Its own generator keeps it from drawing from the global one."""
    kind = FedBatches if batches.feed.num_batches is None else SizedFedBatches
    dataset = kind(batches, length_of(getattr(loader, "dataset", None)))
    return DataLoader(dataset, batch_size=None, collate_fn=_as_it_is, generator=torch.Generator())


def num_samples(loader: Any) -> int | None:
    """The number of samples behind a loader of ours; None for any other."""
    dataset = getattr(loader, "dataset", None)
    return dataset.num_samples if isinstance(dataset, FedBatches) else None


def _as_it_is(batch: Any) -> Any:
    return batch

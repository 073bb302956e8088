"""`jackline.Loader`: a DataLoader for new code, with a seekable order from the start.

    loader = jackline.Loader(dataset, batch_size=32, shuffle=True, seed=1, num_workers=4)
    for epoch in range(3):
        for batch in loader: ...
    state = loader.state_dict()                  # what was consumed; any number of workers before and after

When attached (`jackline.attach(loader=loader)`), its position is kept for you. Owns nothing of its own: batches.py
owns the order, keyed.py the augmentation, torch the workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from jackline.errors import UsageError
from jackline.session.feeds.feed import END, MapFeed
from jackline.session.feeds.keyed import KeyedDataset
from jackline.session.feeds.seekable import SeekableBatches


class Loader:
    """Batches of a map-style dataset.

    All other options go to torch's DataLoader unchanged (num_workers, collate_fn, pin_memory, prefetch_factor,
    persistent_workers, worker_init_fn ...).
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        for word in ("sampler", "batch_sampler", "generator"):
            if word in options:
                raise UsageError(f"jackline.Loader takes no {word}", hint="its order follows from shuffle and seed")
        is_keyed = bool(options.pop("keyed_random", True))
        plain: DataLoader[Any] = DataLoader(dataset, batch_size=batch_size, shuffle=False, **options)
        self.dataset = dataset
        self.batch_sampler = SeekableBatches(dataset, batch_size, is_shuffled=shuffle, drop_last=drop_last, seed=seed)
        keyed = KeyedDataset(
            dataset, plain.collate_fn, seed=seed, is_keyed=is_keyed, is_batched=batch_size is not None
        )
        self._feed = MapFeed(plain, self.batch_sampler, keyed)
        self._epoch = self._batch = 0
        self._is_positioned = True  # the next iteration begins at these two

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch or, after `load_state_dict`, the rest of it; a second iteration is the next epoch."""
        if not self._is_positioned or self._batch >= len(self):
            self._epoch, self._batch = self._epoch + 1, 0
        self._is_positioned = False
        self._feed.open(self._epoch, self._batch)
        while (batch := self._feed.take()) is not END:
            self._batch += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`, from its beginning."""
        self._epoch, self._batch, self._is_positioned = epoch, 0, True

    def state_dict(self) -> dict[str, Any]:
        """The loop's position: the batch it holds counts as consumed."""
        return {**self._feed.state(), "epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._feed.restore(state)
        self._epoch, self._batch, self._is_positioned = int(state["epoch"]), int(state["batch"]), True

    def make_feed(self) -> MapFeed:
        """For `attach`, which keeps the position itself."""
        return self._feed

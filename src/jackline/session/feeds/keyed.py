"""A map-style dataset whose random augmentation depends only on (seed, epoch, index).

It does not depend on which worker reads a sample, on the number of workers, or on what was read before. It wraps the
user's dataset and collate function, in the workers or, without workers, in the training process, whose own generators
are left unchanged.

Seeding every sample would cost 15 us each, though most datasets draw nothing. So a batch is read first and the
generators are checked afterwards (6 us a batch). Only if one was drawn from, the batch is read again with keyed
seeds, and from then on that generator is keyed before reading. The result is the same either way.
"""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Subset, TensorDataset, default_collate, default_convert, get_worker_info

from jackline.data.loader.order import mix
from jackline.session.feeds.own_generators import OwnGenerators
from jackline.session.saving.rng import SOURCES, RngState

_CAREFUL_BATCHES = 8  # at first full copies are taken in the training process: data that draws does so early


class KeyedDataset:
    """The dataset that the DataLoader gets; its `collate` is the collate function.

    An index is (epoch, indices), made by batches.py. Other attributes are those of the user's dataset, for a
    worker_init_fn that uses it.
    """

    _OWN = (
        "_dataset",
        "_collate",
        "_seed",
        "_is_keyed",
        "_is_batched",
        "_is_still",
        "_drawn",
        "_own",
        "_rng_state",
        "_pid",
        "_count",
    )

    def __init__(self, dataset: Any, collate: Any, *, seed: int, is_keyed: bool, is_batched: bool) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._is_keyed = is_keyed
        self._is_batched = is_batched
        self._drawn: set[str] = set()
        self._is_still = is_still(dataset, collate)
        self._own = OwnGenerators(dataset, collate) if is_keyed and not self._is_still else OwnGenerators()
        self._rng_state: RngState | None = None
        self._pid = 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, place: Any) -> Any:
        return place  # read in `collate`, where reading and collating can be repeated together

    def __getattr__(self, name: str) -> Any:
        if name in KeyedDataset._OWN or name.startswith("__"):
            raise AttributeError(name)  # while it is being unpickled in a worker
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in KeyedDataset._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rng_state": None, "_pid": 0}  # for workers that are spawned, not forked

    @property
    def is_keyed(self) -> bool:
        return self._is_keyed

    @property
    def own_names(self) -> list[str]:
        return self._own.names

    def reseed(self, seed: int) -> int:
        """Use a resumed run's seed, whatever seed this process would have chosen."""
        self._seed = seed
        return seed

    @property
    def drawn(self) -> list[str]:
        """The sources that the data were seen to draw from in this process."""
        return sorted(self._drawn) + self._own.names

    def collate(self, place: tuple[int, Any]) -> Any:
        if self._is_still or not self._is_keyed:
            return self._read(place, 0)
        if self._pid != os.getpid():
            self._rng_state, self._pid = RngState(), os.getpid()
        assert self._rng_state is not None
        is_worker = get_worker_info() is not None
        return self._in_worker(place, self._rng_state) if is_worker else self._in_trainer(place, self._rng_state)

    def _in_worker(self, place: tuple[int, Any], rng_state: RngState) -> Any:
        mark = rng_state.mark()
        batch = self._read(place, self._key(place))
        news = rng_state.changed(mark) - self._drawn
        if not news:
            return batch
        self._drawn |= news
        return self._in_worker(place, rng_state)

    def _in_trainer(self, place: tuple[int, Any], rng_state: RngState) -> Any:
        self._count += 1
        copy = rng_state.copy(SOURCES if self._count <= _CAREFUL_BATCHES else self._drawn)
        own = self._own.copy()
        mark = rng_state.mark()
        try:
            batch = self._read(place, self._key(place))
            news = rng_state.changed(mark) - self._drawn
            rng_state.go_back(mark, news - set(copy))
        finally:
            rng_state.put_back(copy)
            self._own.put_back(own)
        if not news:
            return batch
        self._drawn |= news
        return self._in_trainer(place, rng_state)

    def _key(self, place: tuple[int, Any]) -> int:
        return mix(self._seed, place[0]) if self._drawn or self._own else 0

    def _read(self, place: tuple[int, Any], key: int) -> Any:
        """Read the batch; each sample is keyed by its index when anything is known to be drawn."""
        indices = place[1]
        if not self._is_batched:
            self._seed_for(key, indices)
            return self._collate(self._dataset[indices])
        read_all = getattr(self._dataset, "__getitems__", None)
        if callable(read_all):
            self._seed_for(key, indices[0] if indices else 0)
            return self._collate(read_all(indices))
        if not key:
            dataset = self._dataset
            return self._collate([dataset[index] for index in indices])
        samples = []
        for index in indices:
            self._seed_for(key, index)
            samples.append(self._dataset[index])
        return self._collate(samples)

    def _seed_for(self, key: int, index: Any) -> None:
        if not key:
            return
        key = mix(key, index if isinstance(index, int) else _number(index))
        if self._drawn:
            assert self._rng_state is not None
            self._rng_state.seed(key, self._drawn)
        self._own.seed(key)


def is_still(dataset: Any, collate: Any) -> bool:
    """Certain to draw nothing: tensors in memory with torch's own collate function. They need no watching."""
    if collate not in (default_collate, default_convert):
        return False
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


def _number(index: Any) -> int:
    """An integer for an index that is not a number (a pair, a name), the same in every process."""
    import zlib

    return zlib.crc32(repr(index).encode())

"""A DataLoader over an iterable dataset with a position (state_dict, load_state_dict), for any number of workers.

Each worker has a copy of the dataset, so each sends its state along with every batch. The state that came with the
last consumed batch counts, not how far a worker has read ahead. Random draws are keyed by (seed, epoch, worker,
number of items before) and so are the same at resume. The number of workers must not change: their positions cannot
be redistributed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from jackline.data.loader.order import mix
from jackline.session.feeds.attributes import Attributes
from jackline.session.feeds.batches import OnDifference, refuse_difference, refuse_workers, workers_line
from jackline.session.feeds.feed import END, Say
from jackline.session.saving.rng import RngState

_FILLER = "jackline: a place in a batch that was consumed before"


class TaggedStream(IterableDataset[Any]):
    """Wraps the user's dataset and collate function in each worker."""

    def __init__(self, dataset: Any, collate: Any, *, batch_size: int | None, seed: int) -> None:
        self.dataset = dataset
        self.inner_collate = collate
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self.positions: dict[int, dict[str, Any]] = {}  # worker -> {"state", "count"}
        self.first_worker = 0
        self._count = 0
        self._is_over = False  # this pass has ended, perhaps in the middle of a batch

    def __iter__(self) -> Iterator[Any]:
        worker = _worker()
        if worker < self.first_worker:
            # The DataLoader asks workers in turn, beginning with 0. Filler batches, which are discarded, shift the
            # turn to the right worker.
            yield from [_FILLER] * (self.batch_size or 1)
        position = self.positions.get(worker)
        self._count = position["count"] if position else 0
        self._is_over = bool(position and position.get("is_over"))
        if position:
            self.dataset.load_state_dict(position["state"])
        if self._is_over:
            return  # it ended with the last consumed batch; since then its state may mean "at the beginning"
        rng_state, size = RngState(), self.batch_size or 1
        rng_state.seed(mix(self.seed, self.epoch, worker, self._count))
        items = iter(self.dataset)
        while True:
            if self._count % size == 0:
                rng_state.seed(mix(self.seed, self.epoch, worker, self._count, 1))
            try:
                item = next(items)
            except StopIteration:
                self._is_over = True
                return
            self._count += 1
            yield item

    def collate(self, items: Any) -> Any:
        """(worker, its position, batch); no batch for a filler."""
        first = items[0] if self.batch_size is not None else items
        if isinstance(first, str) and first == _FILLER:
            return (_worker(), None, None)
        position = {"state": self.dataset.state_dict(), "count": self._count, "is_over": self._is_over}
        return (_worker(), position, self.inner_collate(items))


class StreamFeed:
    """The feed of a DataLoader over an iterable dataset."""

    kind = "stream"
    can_take_back = False
    num_batches: int | None = None

    def __init__(self, loader: Any, *, seed: int) -> None:
        self.on_difference: OnDifference = refuse_difference
        self.say: Say = lambda _: None
        self._num_workers = max(1, loader.num_workers)
        self._is_here = loader.num_workers == 0  # the training process reads the dataset
        self._stream = TaggedStream(loader.dataset, loader.collate_fn, batch_size=loader.batch_size, seed=seed)
        self._generator = torch.Generator()
        self._loader = rebuild_stream(loader, self._stream, self._stream.collate, self._generator)
        self._rng_state = RngState()
        self._positions: dict[int, dict[str, Any]] = {}
        self._last_worker = -1
        self._is_over = False
        self._batches: Iterator[Any] | None = None
        self._inside: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None
        self._attributes = Attributes([loader.dataset])
        self._initial: dict[str, Any] | None = None  # attributes before the first pass

    @property
    def can_rehearse(self) -> bool:
        """Whether a pass may be begun and dropped."""
        return not self._is_here or self._attributes.is_complete

    def forget(self) -> None:
        """Be as before the first pass."""
        self._attributes.write(self._initial or {})
        self._batches, self._restored = None, None

    def open(self, epoch: int, start: int) -> None:
        if self._initial is None:
            self._initial = self._attributes.read()
        restored, self._restored = self._restored, None
        self._positions, self._last_worker, self._is_over = {}, -1, False
        if restored is not None and start:
            self._positions = {int(worker): position for worker, position in restored["positions"].items()}
            self._last_worker, self._is_over = restored["last_worker"], restored["is_over"]
        stream = self._stream
        stream.epoch, stream.positions = epoch, dict(self._positions)
        stream.first_worker = (self._last_worker + 1) % self._num_workers
        if hasattr(stream.dataset, "set_epoch"):
            stream.dataset.set_epoch(epoch)
        self._generator.manual_seed(mix(stream.seed, epoch) >> 1)
        self._batches = iter(()) if self._is_over else iter(self._loader)
        self._inside = self._rng_state.copy()

    def take(self) -> Any:
        assert self._batches is not None
        while True:
            found = self._take_here() if self._is_here else next(self._batches, None)
            if found is None:
                self._is_over = True
                return END
            worker, position, batch = found
            self._last_worker = worker
            if position is not None:
                self._positions[worker] = position
                return batch

    def state(self, *, takes_back: bool = False) -> dict[str, Any]:
        return {
            "seed": self._stream.seed,
            "num_workers": self._num_workers,
            "positions": {str(worker): position for worker, position in self._positions.items()},
            "last_worker": self._last_worker,
            "is_over": self._is_over,
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["num_workers"] != self._num_workers:
            refuse_workers(state["num_workers"], self._num_workers)
        self._stream.seed = int(state["seed"])
        self._restored = state

    def describe(self) -> list[str]:
        name = type(self._stream.dataset).__name__
        return [f"{name} saves and restores its own position, worker by worker", *workers_line(self._loader)]

    def _take_here(self) -> Any:
        """Take a batch; the training process's own generators are saved before and restored after."""
        assert self._batches is not None
        with self._rng_state.set_aside():
            self._rng_state.put_back(self._inside)
            found = next(self._batches, None)
            self._inside = self._rng_state.copy()
        return found


def rebuild_stream(loader: Any, stream: Any, collate: Any, generator: torch.Generator) -> DataLoader[Any]:
    """A DataLoader like `loader` that reads `stream`, with workers seeded by `generator`."""
    has_workers = loader.num_workers > 0
    options: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if has_workers else None,
        "prefetch_factor": loader.prefetch_factor if has_workers else None,
    }
    if loader.batch_size is not None:
        options["drop_last"] = loader.drop_last
    # Workers run for one epoch: a persistent one would keep the position and the random numbers of the one before.
    return DataLoader(stream, collate_fn=collate, generator=generator, **options)


def _worker() -> int:
    info = get_worker_info()
    return 0 if info is None else int(info.id)

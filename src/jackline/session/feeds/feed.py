"""Where batches come from, and how to return to batch k of epoch e. One class for each way:

    MapFeed       a DataLoader over map-style data, rebuilt with a seekable or replayable order
    StatefulFeed  anything with state_dict and load_state_dict (or state and seek): it positions itself
    SkippingFeed  any other iterable: batches are skipped visibly, after stating the cost (skipping.py)
    CountingFeed  no data: the loop makes its own, and gets the index of the step

Owns iteration and position. The caller counts what was consumed: a feed may have read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from jackline.data.loader.order import mix
from jackline.rundir.records.seen import SkippedBatches
from jackline.session.feeds.batches import (
    OnDifference,
    ReplayedBatches,
    refuse_difference,
    refuse_workers,
    workers_line,
)
from jackline.session.feeds.keyed import KeyedDataset
from jackline.session.feeds.seekable import SeekableBatches

END = object()
Say = Callable[[str], None]


@dataclass
class Position:
    """Where the loop is: the epoch, the batches consumed in it, and those of the whole run."""

    epoch: int = 0
    batch: int = 0
    batches: int = 0

    def advance(self) -> None:
        self.batch += 1
        self.batches += 1


class Feed(Protocol):
    """Call `open`, then `take` until END. Call `state` between two `take`s, `restore` before the first `open`.

    `can_take_back`: the batch taken last may be declared unused by calling `state(takes_back=True)`.
    """

    kind: str
    can_take_back: bool

    @property
    def num_batches(self) -> int | None: ...

    def open(self, epoch: int, start: int) -> None: ...

    def take(self) -> Any: ...

    def state(self, *, takes_back: bool = False) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def describe(self) -> list[str]: ...


def take_wanted(feed: Feed, position: Position, skipped: SkippedBatches, tell: Callable[..., None]) -> Any:
    """The next batch that nobody has taken out of the run, or END. Others are read and dropped: the order stays."""
    first, is_over = position.batches, False
    while not is_over and skipped.covers(position.batches):
        is_over = feed.take() is END
        if not is_over:
            position.advance()
    if count := position.batches - first:
        words = f"batch {first}" if count == 1 else f"the batches {first} to {first + count - 1}"
        tell("skipped_batches", f"left out {words}, as {skipped.origin_of(first)} says", is_loud=True)
    return END if is_over else feed.take()


class MapFeed:
    """A feed over the user's `loader`. Everything about the loader is kept except the order.

    `dataset` wraps its dataset and collate function.
    """

    can_take_back = True

    def __init__(self, loader: Any, batches: SeekableBatches | ReplayedBatches, dataset: KeyedDataset) -> None:
        self.kind = "seekable" if isinstance(batches, SeekableBatches) else "replayed"
        self.batches = batches
        self.on_difference: OnDifference = refuse_difference
        self.say: Say = lambda _: None
        self.dataset = dataset
        self._generator = torch.Generator()
        self.loader: Any = rebuild(loader, batches, dataset, self._generator)
        self._batches_taken: Iterator[Any] | None = None
        self._num_samples: int | None = None  # in this epoch, or in the saved one
        self._is_restored = False

    @property
    def num_batches(self) -> int | None:
        return length_of(self.batches)

    def open(self, epoch: int, start: int) -> None:
        self.batches.seek(epoch, start)
        if isinstance(self.batches, SeekableBatches):
            self._compare_length(self.batches.num_samples, start)
            if start >= len(self.batches):
                self._batches_taken = iter(())  # avoid starting workers for an empty pass
                return
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)  # accelerate's wrapper counts epochs itself
        # Workers are seeded from this, so that the global generator is not used and workers get the same seeds at
        # resume.
        self._generator.manual_seed(mix(self.batches.seed, epoch, 1) >> 1)
        self._batches_taken = iter(self.loader)

    def use(self, loader: Any) -> None:
        """Use the same loader inside a wrapper (a device, a progress bar)."""
        self.loader = loader

    def take(self) -> Any:
        assert self._batches_taken is not None
        batch = next(self._batches_taken, END)
        if batch is not END and isinstance(self.batches, ReplayedBatches):
            self.batches.took()
        return batch

    def state(self, *, takes_back: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {"seed": self.batches.seed}
        if isinstance(self.batches, SeekableBatches):
            return {**found, "batch_size": self.batches.batch_size, "num_samples": self._num_samples}
        return {**found, **self.batches.state(takes_back=takes_back)}

    def restore(self, state: dict[str, Any]) -> None:
        self.batches.seed = self.dataset.reseed(int(state["seed"]))
        self._num_samples, self._is_restored = state.get("num_samples"), True
        if isinstance(self.batches, ReplayedBatches):
            self.batches.restore(state)

    def describe(self) -> list[str]:
        return [*self._describe_order(), *self._describe_rng_state()]

    def _compare_length(self, num_samples: int, start: int) -> None:
        """Data may grow between epochs; after a resume they must have grown as far as before."""
        before, self._num_samples = self._num_samples, num_samples
        is_restored, self._is_restored = self._is_restored, False
        if before in (None, num_samples):
            return
        if is_restored and (start or num_samples < int(before or 0)):
            self.on_difference(
                f"the data have {num_samples} samples now, and had {before} when they were saved: they must have as "
                "many again before run.steps()"
            )
        elif not is_restored:
            self.say(
                f"the data have {num_samples} samples now, {before} in the epoch before. A resumed program must "
                "bring them to the same length before run.steps(), or the resume is refused"
            )

    def _describe_order(self) -> list[str]:
        batches = self.batches
        if isinstance(batches, SeekableBatches):
            if batches.is_shuffled:
                return [f"shuffled by Jackline's own order (seed {batches.seed}), seekable"]
            return ["in plain order, seekable"]
        if batches.positions_itself:
            return [f"{batches.name} saves and restores its own position"]
        words = f"indices of {batches.name} are drawn again at resume, without reading data, and compared"
        if batches.keeps_state:
            words += (
                "; a resume is refused if they depend on what training changes during an epoch: give it state_dict() "
                "and load_state_dict() then"
            )
        return [words]

    def _describe_rng_state(self) -> list[str]:
        if not self.dataset.is_keyed:
            return ["random augmentation is left alone (keyed_random=False): exact with the same workers only"]
        own = self.dataset.own_names
        also = f", also from {', '.join(own)}" if own else ""
        return [f"random augmentation depends on (seed, epoch, index) alone{also}"]


class StatefulFeed:
    """A feed over a loader that can report its position and return to it."""

    kind = "stateful"
    can_take_back = False

    def __init__(self, loader: Any) -> None:
        self.num_batches = length_of(loader)
        self._loader = loader
        self._is_over = False
        self._batches: Iterator[Any] | None = None
        self._restored: Any = None

    @property
    def is_exhausted(self) -> bool:
        """For loaders that know: the end of the data is the end of the run."""
        return bool(getattr(self._loader, "is_exhausted", False))

    def place(self) -> dict[str, Any]:
        """For loaders that go from epoch to epoch by themselves: their position."""
        tell = getattr(self._loader, "place", None)
        return dict(tell()) if callable(tell) else {}

    def stop_when(self, is_asked: Callable[[], bool]) -> None:
        """Pass `is_asked` to loaders that may wait for a long time: they check it and raise `NoMoreWaiting`."""
        if callable(listen := getattr(self._loader, "stop_when", None)):
            listen(is_asked)

    def open(self, epoch: int, start: int) -> None:
        restored, self._restored = self._restored, None
        if restored is not None and start:
            if restored["is_over"]:
                self._batches, self._is_over = iter(()), True
                self._load(restored["state"])
                return
            self._load(restored["state"])
        elif hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        self._is_over = False
        self._batches = iter(self._loader)

    def take(self) -> Any:
        assert self._batches is not None
        batch = next(self._batches, END)
        self._is_over = batch is END
        return batch

    def state(self, *, takes_back: bool = False) -> dict[str, Any]:
        read = getattr(self._loader, "state_dict", None) or self._loader.state
        return {"state": read(), "is_over": self._is_over, "num_workers": getattr(self._loader, "num_workers", None)}

    def restore(self, state: dict[str, Any]) -> None:
        workers, now = state.get("num_workers"), getattr(self._loader, "num_workers", None)
        if isinstance(workers, int) and isinstance(now, int) and workers != now:
            refuse_workers(workers, now)
        self._restored = state

    def describe(self) -> list[str]:
        return [f"{type(self._loader).__name__} saves and restores its own position", *workers_line(self._loader)]

    def _load(self, state: Any) -> None:
        load = getattr(self._loader, "load_state_dict", None) or self._loader.seek
        load(state)


class CountingFeed:
    """No loader: every batch is its own index."""

    kind = "none"
    can_take_back = True
    num_batches: int | None = None

    def __init__(self) -> None:
        self._next = 0

    def open(self, epoch: int, start: int) -> None:
        self._next = start

    def take(self) -> Any:
        self._next += 1
        return self._next - 1

    def state(self, *, takes_back: bool = False) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def describe(self) -> list[str]:
        return []


def rebuild(
    loader: Any, batches: SeekableBatches | ReplayedBatches, dataset: KeyedDataset, generator: torch.Generator
) -> DataLoader[Any]:
    """A DataLoader like `loader`, with the same workers, that reads `batches`."""
    has_workers = loader.num_workers > 0
    options = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if has_workers else None,
        "prefetch_factor": loader.prefetch_factor if has_workers else None,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    ours: dict[str, Any] = {"batch_sampler": batches, "collate_fn": dataset.collate, "generator": generator}
    wrapped: Any = dataset
    return DataLoader(wrapped, **ours, **options)


def length_of(sized: Any) -> int | None:
    """The length; None for an object that does not know it."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None

"""Where batches come from, and how to return to batch k of epoch e. One class for each way:

    MapFeed       a DataLoader over map-style data, rebuilt with a seekable or replayable order
    StatefulFeed  anything with state_dict and load_state_dict (or state and seek): it positions itself
    SkippingFeed  any other iterable: batches are skipped visibly, after stating the cost
    CountingFeed  no data: the loop makes its own, and gets the index of the step

Owns iteration and position. The caller counts what was consumed: a feed may have read ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from jackline.data.loader.order import mix
from jackline.errors import UsageError
from jackline.session.feeds.batches import ReplayedBatches, SeekableBatches
from jackline.session.feeds.keyed import KeyedDataset
from jackline.session.phase import phase
from jackline.session.saving.rng import RngState
from jackline.units import format_duration

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
    num_batches: int | None
    can_take_back: bool

    def open(self, epoch: int, start: int) -> None: ...

    def take(self) -> Any: ...

    def state(self, *, takes_back: bool = False) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def describe(self) -> list[str]: ...


class MapFeed:
    """A feed over the user's `loader`. Everything about the loader is kept except the order.

    `dataset` wraps its dataset and collate function.
    """

    can_take_back = True

    def __init__(self, loader: Any, batches: SeekableBatches | ReplayedBatches, dataset: KeyedDataset) -> None:
        self.kind = "seekable" if isinstance(batches, SeekableBatches) else "replayed"
        self.num_batches = length_of(batches)
        self.batches = batches
        self.dataset = dataset
        self._generator = torch.Generator()
        self.loader: Any = rebuild(loader, batches, dataset, self._generator)
        self._batches_taken: Iterator[Any] | None = None
        self._expected: int | None = None

    def open(self, epoch: int, start: int) -> None:
        if isinstance(self.batches, SeekableBatches):
            self.batches.seek(epoch, start)
            if start >= len(self.batches):
                self._batches_taken = iter(())  # avoid starting workers for an empty pass
                return
        else:
            self.batches.seek(epoch, start, self._expected)
            self._expected = None
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
            return {**found, "batch_size": self.batches.batch_size}
        return {**found, "last_indices": self.batches.fingerprint(takes_back=takes_back)}

    def restore(self, state: dict[str, Any]) -> None:
        self.batches.seed = self.dataset.reseed(int(state["seed"]))
        self._expected = state.get("last_indices")

    def describe(self) -> list[str]:
        return [*self._describe_order(), *self._describe_rng_state()]

    def _describe_order(self) -> list[str]:
        batches = self.batches
        if isinstance(batches, SeekableBatches):
            if batches.is_shuffled:
                return [f"shuffled by Jackline's own order (seed {batches.seed}), seekable"]
            return ["in plain order, seekable"]
        words = f"indices of {batches.name} are drawn again at resume, without reading data"
        if batches.keeps_state:
            words += "; those of earlier epochs too, since it may change from epoch to epoch"
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
        return {"state": read(), "is_over": self._is_over}

    def restore(self, state: dict[str, Any]) -> None:
        self._restored = state

    def describe(self) -> list[str]:
        return [f"{type(self._loader).__name__} saves and restores its own position"]

    def _load(self, state: Any) -> None:
        load = getattr(self._loader, "load_state_dict", None) or self._loader.seek
        load(state)


class SkippingFeed:
    """A feed over any iterable.

    What it draws from this process's generators is isolated, so that skipping the same batches again gives the same
    ones.
    """

    kind = "skipped"
    can_take_back = True

    def __init__(self, loader: Any, *, seed: int, say: Say) -> None:
        self.num_batches = length_of(loader)
        self._loader = loader
        self._seed = seed
        self._say = say
        self._rng_state = RngState()
        self._inside: dict[str, Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._num_taken, self._taking_s, self._s_per_batch = 0, 0.0, 0.0
        self._has_warned = False

    def open(self, epoch: int, start: int) -> None:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        self._num_taken = 0
        with self._rng_state.set_aside():
            self._rng_state.seed(mix(self._seed, epoch))
            self._batches = iter(self._loader)
            self._inside = self._rng_state.copy()
        if start:
            self._skip(start)

    def take(self) -> Any:
        began_s = time.perf_counter()
        batch = self._take_apart() if self._inside is not None else self._take_watched()
        self._num_taken += 1
        self._taking_s += time.perf_counter() - began_s
        return batch

    def state(self, *, takes_back: bool = False) -> dict[str, Any]:
        return {"seed": self._seed, "s_per_batch": self._taking_s / self._num_taken if self._num_taken else 0.0}

    def restore(self, state: dict[str, Any]) -> None:
        self._seed = int(state["seed"])
        self._s_per_batch = float(state["s_per_batch"])

    def describe(self) -> list[str]:
        return [f"{type(self._loader).__name__} has no state_dict(): batches are read over at resume"]

    def _skip(self, count: int) -> None:
        cost = f", about {format_duration(self._s_per_batch * count)}" if self._s_per_batch else ""
        self._say(f"the data cannot be positioned: skipping {count} batches{cost}")
        began_s = time.monotonic()
        for done in phase("read over", range(count), unit="batches"):
            if self.take() is END:
                raise UsageError(
                    f"the data end after {done} batches, but {count} were consumed before",
                    hint="are they the same data as before?",
                )
        self._say(f"read over {count} batches in {format_duration(time.monotonic() - began_s)}")

    def _take_apart(self) -> Any:
        """Take with generators of its own.

        After three batches that drew nothing they are only watched: 0.3 ms less.
        """
        assert self._batches is not None and self._inside is not None
        with self._rng_state.set_aside():
            self._rng_state.put_back(self._inside)
            mark = self._rng_state.mark()
            batch = next(self._batches, END)
            has_drawn = bool(self._rng_state.changed(mark))
            self._inside = self._rng_state.copy()
        if self._num_taken >= 2 and not has_drawn:
            self._inside = None
        return batch

    def _take_watched(self) -> Any:
        assert self._batches is not None
        mark = self._rng_state.mark()
        batch = next(self._batches, END)
        if not self._has_warned and self._rng_state.changed(mark):
            self._has_warned = True
            self._say("these data draw random numbers in the training process now and then: resume is not bit-exact")
        return batch


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

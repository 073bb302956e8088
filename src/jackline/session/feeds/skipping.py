"""A feed over data that cannot be positioned (a stream, any iterable): batches up to the position are read again.

That is exact only if a pass over the data can be repeated. So everything a pass is known to depend on is made the
same again: random numbers of this process, the seed of the workers, generators and attributes of the dataset. Whether
that is enough is tried before training, and each batch that is read again is compared with the checksum of before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from jackline.data.loader.order import mix
from jackline.session.feeds.attributes import Attributes
from jackline.session.feeds.batches import OnDifference, refuse_difference, workers_line
from jackline.session.feeds.feed import END, Say, length_of
from jackline.session.feeds.own_generators import OwnGenerators
from jackline.session.feeds.streams import rebuild_stream
from jackline.session.feeds.trail import Trail, checksum, first_difference
from jackline.session.phase import phase
from jackline.session.saving.rng import RngState
from jackline.units import format_duration


class SkippingFeed:
    """A feed over any iterable.

    What it draws from this process's generators is isolated, so that skipping the same batches again gives the same
    ones.
    """

    kind = "skipped"
    can_take_back = True

    def __init__(self, loader: Any, *, seed: int, say: Say) -> None:
        self.on_difference: OnDifference = refuse_difference
        self.say = say
        self._loader = loader
        self._data = getattr(loader, "dataset", loader)
        self._num_workers = int(getattr(loader, "num_workers", 0) or 0)
        self._workers_line = workers_line(loader)
        self._generator = torch.Generator()
        is_plain = type(loader) is DataLoader
        self._reader = rebuild_stream(loader, self._data, loader.collate_fn, self._generator) if is_plain else loader
        self._attributes = Attributes([self._data] if hasattr(self._data, "__dict__") else [])
        self._own = OwnGenerators(self._data)
        self._seed = seed
        self._rng_state = RngState()
        self._inside: dict[str, Any] | None = None
        self._own_inside: list[Any] = []
        self._batches: Iterator[Any] | None = None
        self._num_taken, self._taking_s, self._s_per_batch = 0, 0.0, 0.0
        self._has_warned = False
        self._trail = Trail()
        self._at_start: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None
        self._initial: dict[str, Any] | None = None  # attributes before the first pass

    @property
    def num_batches(self) -> int | None:
        return length_of(self._loader)

    @property
    def can_rehearse(self) -> bool:
        """Whether a pass may be begun and dropped: it leaves no trace in workers, or one that can be removed."""
        if isinstance(self._data, list | tuple | range):
            return False  # they are the same each time
        is_read_once = self._reader is self._loader and iter_is_self(self._loader)
        return not is_read_once and (self._num_workers > 0 or self._attributes.is_complete)

    def open(self, epoch: int, start: int) -> None:
        if self._initial is None:
            self._initial = self._attributes.read()
        saved, self._saved = self._saved, None
        if saved is None and start:  # the same epoch is opened again
            saved = {"at_start": self._at_start, "trail": self._trail.state()}
        self._attributes.write((saved or {}).get("at_start" if start else "now", {}))
        self._at_start = self._attributes.read()
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)
        elif hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        self._num_taken, self._trail = 0, Trail()
        key = mix(self._seed, epoch)
        self._generator.manual_seed(key >> 1)
        outside = self._own.copy()
        with self._rng_state.set_aside():
            self._rng_state.seed(key)
            self._own.seed(mix(key, 2))
            self._batches = iter(self._reader)
            self._inside, self._own_inside = self._rng_state.copy(), self._own.copy()
        self._own.put_back(outside)
        if start:
            self._skip(epoch, start, (saved or {}).get("trail"))

    def forget(self) -> None:
        """Be as before the first pass."""
        self._attributes.write(self._initial or {})
        self._batches, self._saved = None, None
        self._num_taken, self._taking_s = 0, 0.0

    def take(self) -> Any:
        began_s = time.perf_counter()
        batch = self._take_apart() if self._inside is not None else self._take_watched()
        self._num_taken += 1
        self._taking_s += time.perf_counter() - began_s
        if batch is not END:
            self._trail.add(checksum(batch))
        return batch

    def state(self, *, takes_back: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {
            "seed": self._seed,
            "s_per_batch": self._taking_s / self._num_taken if self._num_taken else 0.0,
            "num_workers": self._num_workers,
            "trail": self._trail.state(takes_back=takes_back),
        }
        for name, attributes in (("at_start", self._at_start), ("now", self._attributes.read())):
            if changed := self._attributes.changed(attributes):
                found[name] = changed
        return found

    def restore(self, state: dict[str, Any]) -> None:
        self._seed = int(state["seed"])
        self._s_per_batch = float(state["s_per_batch"])
        self._saved = state
        workers = int(state.get("num_workers", self._num_workers))
        if workers != self._num_workers:
            self.on_difference(
                f"the data were read by {workers} workers and are read by {self._num_workers} now: their batches "
                "come in another order"
            )

    def describe(self) -> list[str]:
        own = f"; {', '.join(self._own.names)} is seeded for each epoch" if self._own else ""
        return [
            f"{type(self._data).__name__} has no state_dict(): batches are read over at resume and compared with "
            f"those of before{own}",
            *self._workers_line,
        ]

    def _skip(self, epoch: int, count: int, trail: Any) -> None:
        cost = f", about {format_duration(self._s_per_batch * count)}" if self._s_per_batch else ""
        self.say(f"the data cannot be positioned: skipping {count} batches{cost}")
        began_s = time.monotonic()
        done = 0
        for done in phase("read over", range(1, count + 1), unit="batches"):
            if self.take() is END:
                self.on_difference(f"the data end after {done - 1} batches, but {count} were consumed before")
                break
        batch = first_difference(trail, self._trail)
        if batch is not None:
            self.on_difference(
                f"the data are not the same again: in epoch {epoch}, batch {batch} differs from the one that was "
                "trained on"
            )
        self.say(f"read over {count} batches in {format_duration(time.monotonic() - began_s)}")

    def _take_apart(self) -> Any:
        """Take with generators of its own.

        After three batches that drew nothing they are only watched: 0.3 ms less.
        """
        assert self._batches is not None and self._inside is not None
        outside = self._own.copy()
        with self._rng_state.set_aside():
            self._rng_state.put_back(self._inside)
            self._own.put_back(self._own_inside)
            mark = self._rng_state.mark()
            batch = next(self._batches, END)
            has_drawn = bool(self._rng_state.changed(mark))
            self._inside, self._own_inside = self._rng_state.copy(), self._own.copy()
        self._own.put_back(outside)
        if self._num_taken >= 2 and not has_drawn and not self._own:
            self._inside = None
        return batch

    def _take_watched(self) -> Any:
        assert self._batches is not None
        mark = self._rng_state.mark()
        batch = next(self._batches, END)
        if not self._has_warned and self._rng_state.changed(mark):
            self._has_warned = True
            self.say("these data draw random numbers in the training process now and then: resume is not bit-exact")
        return batch


def iter_is_self(loader: Any) -> bool:
    """Whether it is an iterator, which can be read once."""
    return callable(getattr(loader, "__next__", None))

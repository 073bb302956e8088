"""Which samples make up batch k of epoch e, for a sampler or batch sampler that is not ours.

Its indices are drawn again from the same RNG state, without reading data, and compared with those drawn before.
Yields (epoch, indices). seekable.py owns the order of plain loaders, which needs no drawing.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from jackline.data.loader.order import mix
from jackline.errors import CannotResume
from jackline.session.feeds.attributes import Attributes
from jackline.session.feeds.own_generators import OwnGenerators
from jackline.session.feeds.seekable import Place
from jackline.session.feeds.trail import Trail, checksum, first_difference
from jackline.session.saving.rng import RngState

OnDifference = Callable[[str], None]
_CHUNK = 256  # batches of indices drawn at a time: saving and restoring the generators costs 0.3 ms
_STATELESS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class Trace(NamedTuple):
    """What a sampler yielded in an epoch so far: how many batches, and the checksum of their indices."""

    epoch: int
    num_batches: int
    checksum: int


def refuse_difference(text: str) -> None:
    raise CannotResume(
        text,
        hint="what they depend on must be the same again: give it a generator, set_epoch() or state_dict(); "
        "on_change={'data': 'warn'} resumes with other data, attach(new=True) starts another run",
    )


def workers_line(loader: Any) -> list[str]:
    """What must not change until a resume, where the loader has workers that read a stream."""
    count = getattr(loader, "num_workers", None)
    return [f"a resume needs the same number of workers ({count})"] if isinstance(count, int) else []


def refuse_workers(before: int, now: int) -> None:
    raise CannotResume(
        f"the data were read by {before} workers and are read by {now} now",
        hint=f"set num_workers={before}: the position in a stream belongs to the worker that reads it",
    )


class ReplayedBatches:
    """The indices of a sampler that is not ours, in isolation: neither side sees the other's random numbers.

    A sampler of an unknown type may change itself from epoch to epoch (shuffle a list it keeps), and training may
    change it (weights that follow the losses). So its attributes are saved as they were when the epoch began, and as
    they are now; it is drawn from no further ahead than the DataLoader asks; one with `state_dict` positions itself.
    If its attributes are not all understood, the epochs before are drawn as well.
    """

    def __init__(self, source: Any, *, seed: int, data: Any = None) -> None:
        self.source = source
        self.seed = seed
        self.on_difference: OnDifference = refuse_difference
        self._parts = [part for part in (source, getattr(source, "sampler", None)) if part is not None]
        self._own = OwnGenerators(source)
        self._base = self._own.initial_seed()
        self._attributes = Attributes([part for part in self._parts if not isinstance(part, list | tuple)], data)
        self._stateful: Any = next((part for part in self._parts if _is_stateful(part)), None)
        self._positions: tuple[Any, Any] = (None, None)  # of a stateful one: before and after the last taken batch
        self._rng_state = RngState()
        self._epoch = 0
        self._start = 0
        self._next_epoch = 0  # the sampler's own count: how many passes were requested from it
        self._at_start: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None  # the state to restore before the next pass
        self._trail = Trail()
        self._handed_out: deque[Any] = deque()  # batches given to the DataLoader, which reads ahead
        self._drawn = Trace(0, 0, 0)
        self._recorded: Trace | None = None

    def __len__(self) -> int:
        return len(self.source)

    @property
    def name(self) -> str:
        """The name of what draws: the sampler inside a batch sampler."""
        return type(getattr(self.source, "sampler", self.source)).__name__

    @property
    def keeps_state(self) -> bool:
        """Whether a pass may depend on the passes before it, or on what training does meanwhile."""
        return any(type(part) not in _STATELESS for part in self._parts)

    @property
    def positions_itself(self) -> bool:
        return self._stateful is not None

    def seek(self, epoch: int, start: int) -> None:
        if start and self._saved is None:  # the same epoch is opened again
            self._saved = self.state(takes_back=False)
            self._saved["at_start"] = self._at_start
        self._epoch, self._start = epoch, start
        self._handed_out.clear()

    def set_epoch(self, epoch: int) -> None:
        """For frameworks that count epochs themselves, and take batches without `took`."""
        self._epoch = epoch
        self._handed_out.clear()

    def trace(self) -> list[int]:
        """The trace of the indices drawn in this epoch so far, for a framework's notes; `expect` compares with it."""
        return list(self._drawn)

    def expect(self, trace: list[int]) -> None:
        self._recorded = Trace(*map(int, trace))

    def took(self) -> None:
        """One more batch reached the training loop."""
        indices, position = self._handed_out.popleft()
        self._trail.add(checksum(indices))
        self._positions = (self._positions[1], position)

    def state(self, *, takes_back: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"trail": self._trail.state(takes_back=takes_back)}
        if self._stateful is not None:
            before, after = self._positions
            is_ahead = bool(self._handed_out)
            return {**found, "sampler": before if takes_back else after if is_ahead else self._stateful.state_dict()}
        for name, attributes in (("at_start", self._at_start), ("now", self._attributes.read())):
            if changed := self._attributes.changed(attributes):
                found[name] = changed
        return found

    def restore(self, state: dict[str, Any]) -> None:
        self._saved = state

    def __iter__(self) -> Iterator[Place]:
        epoch, start = self._epoch, self._start
        saved, self._saved = self._saved, None
        self._trail = Trail()
        if self._stateful is not None:
            drawn = self._draw_positioned(epoch, start, saved or {})
        else:
            drawn = self._draw_again(epoch, start, saved or {})
        self._drawn = Trace(epoch, start, 0)
        for indices in drawn:
            position = None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())
            self._handed_out.append((indices, position))
            count, crc = self._drawn.num_batches + 1, zlib.crc32(repr(indices).encode(), self._drawn.checksum)
            self._drawn = Trace(epoch, count, crc)
            self._compare(self._drawn)
            yield epoch, indices

    def _compare(self, drawn: Trace) -> None:
        recorded = self._recorded
        if recorded is not None and recorded[:2] == drawn[:2]:
            self._recorded = None
            if recorded != drawn:
                self.on_difference(
                    f"the sampler {self.name} does not give the same indices again: epoch {drawn.epoch} differs "
                    f"before batch {drawn.num_batches}"
                )

    def _draw_again(self, epoch: int, start: int, saved: dict[str, Any]) -> Iterator[Any]:
        """The indices from batch `start` on; those before it are drawn here and compared."""
        if self.keeps_state and not self._attributes.is_complete:
            while self._next_epoch < epoch:
                for _ in self._draw(self._next_epoch):
                    pass
        self._attributes.write(saved.get("at_start" if start else "now", {}))
        drawn = self._draw(epoch)
        count = 0
        for indices in itertools.islice(drawn, start):
            self._trail.add(checksum(indices))
            count += 1
        if start:
            batch = first_difference(saved.get("trail"), self._trail) or (count + 1 if count < start else None)
            if batch is not None:
                self.on_difference(
                    f"the sampler {self.name} does not give the same indices again: epoch {epoch} differs at batch "
                    f"{batch}"
                )
            self._attributes.write(saved.get("now", {}))
        return drawn

    def _draw_positioned(self, epoch: int, start: int, saved: dict[str, Any]) -> Iterator[Any]:
        """The same from a sampler that is told its position. Each batch has random numbers of its own."""
        key = mix(self.seed, self._base, epoch)
        if (position := saved.get("sampler")) is not None:
            self._stateful.load_state_dict(copy.deepcopy(position))
        with self._rng_state.set_aside():
            self._seed(key)
            if not start:
                _set_epoch(self.source, epoch)
            pass_over = iter(self.source)
        position = copy.deepcopy(self._stateful.state_dict())
        self._positions = (position, position)
        for number in itertools.count(start):
            with self._rng_state.set_aside():
                self._seed(mix(key, number))
                try:
                    indices = next(pass_over)
                except StopIteration:
                    return
            yield indices

    def _seed(self, key: int) -> None:
        self._rng_state.seed(key)
        self._own.seed(key)

    def _draw(self, epoch: int) -> Iterator[Any]:
        """One pass over the sampler. It has its own RNG state, also between chunks."""
        self._next_epoch = epoch + 1
        size = 1 if self.keeps_state else _CHUNK
        with self._rng_state.set_aside():
            self._seed(mix(self.seed, self._base, epoch))
            _set_epoch(self.source, epoch)
            self._at_start = self._attributes.read()
            pass_over = iter(self.source)
            chunk = list(itertools.islice(pass_over, size))
            inside = self._rng_state.copy()
        while chunk:
            yield from chunk
            with self._rng_state.set_aside():
                self._rng_state.put_back(inside)
                chunk = list(itertools.islice(pass_over, size))
                inside = self._rng_state.copy()


def _is_stateful(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _set_epoch(sampler: Any, epoch: int) -> None:
    for part in (sampler, getattr(sampler, "sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

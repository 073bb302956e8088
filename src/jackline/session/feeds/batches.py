"""Which samples make up batch k of epoch e, for a DataLoader's batch sampler.

`SeekableBatches`: a keyed permutation, any k in O(1). `ReplayedBatches`: a user's own sampler, whose indices are
drawn again from the same RNG state, without reading data. Both yield (epoch, indices) and depend only on (seed,
epoch).
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from jackline.data.loader.order import Blocks, Permutation, mix
from jackline.errors import CannotResume
from jackline.session.feeds.own_generators import OwnGenerators
from jackline.session.saving.rng import RngState

Place = tuple[int, Any]  # epoch, and the indices passed to the dataset
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


class SeekableBatches:
    """Batches from a keyed permutation of the whole dataset, or in plain order."""

    def __init__(
        self, num_samples: int, batch_size: int | None, *, is_shuffled: bool, drop_last: bool, seed: int
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.is_shuffled = is_shuffled
        self.drop_last = drop_last
        self.seed = seed
        self._epoch = 0
        self._start = 0

    def __len__(self) -> int:
        size = self.batch_size or 1
        return self.num_samples // size if self.drop_last else -(-self.num_samples // size)

    def seek(self, epoch: int, start: int) -> None:
        """Make the next pass that of `epoch`, starting at batch `start`."""
        self._epoch, self._start = epoch, start

    def set_epoch(self, epoch: int) -> None:
        """For frameworks that count epochs themselves."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Place]:
        epoch, size = self._epoch, self.batch_size or 1
        blocks = None
        if self.is_shuffled and self.num_samples:
            blocks = Blocks(Permutation(self.num_samples, mix(self.seed, epoch)))
        for number in range(self._start, len(self)):
            first = number * size
            count = min(size, self.num_samples - first)
            if blocks is not None:
                indices = blocks.take(first, count).tolist()
            else:
                indices = list(range(first, first + count))
            yield epoch, indices if self.batch_size is not None else indices[0]


class ReplayedBatches:
    """The indices of a sampler that is not ours, in isolation: neither side sees the other's random numbers.

    A sampler of an unknown type may change itself from epoch to epoch (shuffle a list it keeps). So to reach a
    position in epoch e, the epochs before it are drawn as well. torch's own samplers do not need that.
    """

    def __init__(self, source: Any, *, seed: int) -> None:
        self.source = source
        self.seed = seed
        self._own = OwnGenerators(source)
        self._base = self._own.initial_seed()
        self._rng_state = RngState()
        self._epoch = 0
        self._start = 0
        self._next_epoch = 0  # the sampler's own count: how many passes were requested from it
        self._expected: int | None = None
        self._handed_out: deque[Any] = deque()  # batches given to the DataLoader, which reads ahead
        self._last: tuple[Any, Any] = (None, None)  # the last two batches that were taken
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
        """Whether a pass may depend on the passes before it."""
        parts = (self.source, getattr(self.source, "sampler", None))
        return any(part is not None and type(part) not in _STATELESS for part in parts)

    def seek(self, epoch: int, start: int, expected: int | None = None) -> None:
        """`expected` is the fingerprint of the batch before `start`, when one is known."""
        self._epoch, self._start, self._expected = epoch, start, expected
        self._handed_out.clear()
        self._last = (None, None)

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
        self._last = (self._last[1], self._handed_out.popleft())

    def fingerprint(self, *, takes_back: bool) -> int | None:
        """The fingerprint of the last consumed batch, compared at resume."""
        last = self._last[0 if takes_back else 1]
        return None if last is None else _fingerprint(last)

    def __iter__(self) -> Iterator[Place]:
        epoch, start = self._epoch, self._start
        if self.keeps_state:
            while self._next_epoch < epoch:
                for _ in self._draw(self._next_epoch):
                    pass
        drawn = self._draw(epoch)
        if start:
            self._check(list(itertools.islice(drawn, start - 1, start)), start)
        self._drawn = Trace(epoch, start, 0)
        for indices in drawn:
            self._handed_out.append(indices)
            self._drawn = Trace(
                epoch, self._drawn.num_batches + 1, zlib.crc32(repr(indices).encode(), self._drawn.checksum)
            )
            self._compare(self._drawn)
            yield epoch, indices

    def _compare(self, drawn: Trace) -> None:
        recorded = self._recorded
        if recorded is not None and recorded[:2] == drawn[:2]:
            self._recorded = None
            if recorded != drawn:
                raise CannotResume(
                    f"the sampler {self.name} does not give the same indices again: epoch {drawn.epoch} differs "
                    f"before batch {drawn.num_batches}",
                    hint="give it a generator or set_epoch(), or start another run with new=True",
                )

    def _check(self, before: list[Any], start: int) -> None:
        if self._expected is not None and (not before or _fingerprint(before[0]) != self._expected):
            raise CannotResume(
                f"the sampler {self.name} does not give the same indices again: batch {start} differs",
                hint="give it a generator or set_epoch(), or attach(on_change={'data': 'go on'})",
            )
        self._last = (None, before[0] if before else None)

    def _draw(self, epoch: int) -> Iterator[Any]:
        """One pass over the sampler. It has its own RNG state, also between chunks."""
        self._next_epoch = epoch + 1
        with self._rng_state.set_aside():
            key = mix(self.seed, self._base, epoch)
            self._rng_state.seed(key)
            self._own.seed(key)
            _set_epoch(self.source, epoch)
            pass_over = iter(self.source)
            chunk = list(itertools.islice(pass_over, _CHUNK))
            inside = self._rng_state.copy()
        while chunk:
            yield from chunk
            with self._rng_state.set_aside():
                self._rng_state.put_back(inside)
                chunk = list(itertools.islice(pass_over, _CHUNK))
                inside = self._rng_state.copy()


def _set_epoch(sampler: Any, epoch: int) -> None:
    for part in (sampler, getattr(sampler, "sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _fingerprint(indices: Any) -> int:
    return zlib.crc32(repr(indices).encode())

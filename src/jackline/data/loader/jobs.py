"""Decides which windows come next: turns positions into places in era files, several batches at a time.

Owns: the order of (seed, epoch, era), the borders of eras and epochs, a rank's share of a batch. A job is one or more
whole batches, because planning a job and passing it to a thread cost as much as reading a dozen windows. The division
into jobs does not change the batches. Does not own reading (windows.py) or who waits (loader.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jackline.data.cache.directory import Cache
from jackline.data.cache.eras import WindowShape, locate, windows_before
from jackline.data.loader.order import Blocks, Permutation, mix
from jackline.errors import JacklineError, UsageError

_MAX_JOB_WINDOWS = 1024
Starts = NDArray[np.uint64]


@dataclass(frozen=True)
class LoaderSettings:
    """What a batch is. `batch_size` is the global batch; a rank takes its slice of it."""

    seq_len: int
    batch_size: int
    stride: int | None = None  # None: windows share one token, the target of one is the first input of the next
    seed: int = 0
    shuffle: Literal["era", "none"] = "era"
    epochs: int | None = None  # None: without end
    drop_last: bool = True
    rank: int = 0
    world_size: int = 1
    num_threads: int = 1
    num_prefetched: int = 2  # jobs of up to 1,024 windows each
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.batch_size < 1:
            raise UsageError(f"batches of {self.batch_size} x {self.seq_len} tokens cannot be read")
        if self.batch_size % self.world_size:
            raise UsageError(f"a batch of {self.batch_size} cannot be shared by {self.world_size} ranks")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of {self.world_size} does not exist")
        for name, most in (("num_threads", 64), ("num_prefetched", 1024)):
            if not 0 <= getattr(self, name) <= most:
                raise UsageError(f"{name} must be from 0 to {most}, not {getattr(self, name)}")
        if self.shuffle not in ("era", "none"):
            raise UsageError(f"shuffle is '{self.shuffle}'", hint="it must be one of: era, none")


@dataclass(frozen=True)
class Part:
    """Windows of one era, given by their first tokens inside it."""

    era: int
    starts: Starts


@dataclass(frozen=True)
class Job:
    """Whole batches from one position on (or the incomplete last batch), and where the next job begins."""

    epoch: int
    position: int
    num_windows: int  # of all ranks
    rows_per_batch: int  # of this rank
    parts: tuple[Part, ...]
    next_epoch: int
    next_position: int


class End:
    """All epochs are over."""


class NotReady:
    """The era does not exist yet."""

    def __init__(self, era: int) -> None:
        self.era = era


class Planner:
    """Plans jobs one after the other; holds one block of the order (0.5 MB) for each of two eras."""

    def __init__(self, cache: Cache, settings: LoaderSettings, is_ready: Callable[[int], bool]) -> None:
        self._cache = cache
        self._settings = settings
        self._is_ready = is_ready
        self.shape = window_shape(cache, settings)
        self._blocks: dict[tuple[int, int], Blocks] = {}

    def plan(self, epoch: int, position: int, num_batches: int) -> Job | NotReady | End:
        """A job of up to `num_batches` from a position; NotReady if not even one batch of it can be read now."""
        batch_size = self._settings.batch_size
        while self._settings.epochs is None or epoch < self._settings.epochs:
            parts, count, missing = self._windows_from(epoch, position, batch_size * num_batches)
            whole = count // batch_size * batch_size
            if whole:
                return self._job(epoch, position, parts, whole)
            if missing is not None:
                return NotReady(missing)
            if count and not self._settings.drop_last:
                return self._job(epoch, position, parts, count)
            if position == 0:
                raise self._too_small()
            epoch, position = epoch + 1, 0
        return End()

    @property
    def max_batches(self) -> int:
        return max(1, _MAX_JOB_WINDOWS // self._settings.batch_size)

    def era_at(self, position: int) -> int:
        return locate(position, self._cache.plan, self.shape).era

    def num_windows(self) -> int | None:
        """Windows of an epoch; None while the corpus is not finished."""
        last = self._cache.ledger.last_era
        if last is None:
            return None
        tokens = self._cache.num_tokens(last) or 0
        return windows_before(last, self._cache.plan, self.shape) + self.shape.count_in(tokens)

    def normal(self, epoch: int, position: int) -> tuple[int, int]:
        """The same place; at the end of an epoch it is written as the start of the next one."""
        total = self.num_windows()
        needed = self._settings.batch_size if self._settings.drop_last else 1
        return (epoch + 1, 0) if total is not None and position and total - position < needed else (epoch, position)

    def _windows_from(self, epoch: int, position: int, wanted: int) -> tuple[list[Part], int, int | None]:
        """Up to `wanted` windows, their number, and the missing era if that is why there are fewer."""
        parts: list[Part] = []
        count = 0
        while count < wanted:
            place = locate(position + count, self._cache.plan, self.shape)
            if not self._is_ready(place.era):
                return parts, count, place.era
            in_era = self.shape.count_in(self._cache.num_tokens(place.era) or 0)
            take = min(wanted - count, in_era - place.index)
            if take <= 0:
                break
            parts.append(Part(place.era, self._starts(epoch, place.era, in_era, place.index, take)))
            count += take
        return parts, count, None

    def _starts(self, epoch: int, era: int, n: int, index: int, count: int) -> Starts:
        stride = np.uint64(self.shape.stride)
        if self._settings.shuffle == "none":
            return np.arange(index, index + count, dtype=np.uint64) * stride
        blocks = self._blocks.get((epoch, era))
        if blocks is None:
            while len(self._blocks) > 1:  # the previous one stays: a job may span two eras
                del self._blocks[next(iter(self._blocks))]
            blocks = self._blocks[epoch, era] = Blocks(Permutation(n, mix(self._settings.seed, epoch, era)))
        return blocks.take(index, count) * stride

    def _job(self, epoch: int, position: int, parts: list[Part], count: int) -> Job:
        rows, world, rank = self._settings.batch_size, self._settings.world_size, self._settings.rank
        if count < rows:  # the incomplete last batch
            first, last = count * rank // world, count * (rank + 1) // world
            mine = _cut(parts, first, last)
            return Job(epoch, position, count, last - first, tuple(mine), epoch + 1, 0)
        share = rows // world
        mine = _cut(parts, 0, count) if world == 1 else _shares(parts, range(rank * share, count, rows), share)
        return Job(epoch, position, count, share, tuple(mine), epoch, position + count)

    def _too_small(self) -> JacklineError:
        total = self._cache.total_tokens() or 0
        if total == 0:
            return JacklineError(
                f"no document was kept: {self._left_out()}",
                hint="check the split, min_chars and the source; documents=line or block makes more of a txt file",
            )
        return JacklineError(
            f"the data has {total:,} tokens: not enough for one batch of {self._settings.batch_size} windows of "
            f"{self.shape.tokens} tokens",
            hint="give more data, a smaller batch or a shorter sequence",
        )

    def _left_out(self) -> str:
        last = self._cache.ledger.last_era
        counts = self._cache.ledger.records[last or 0].ends_at.state.counts
        return (
            f"of {counts.records:,} records {counts.empty:,} are empty, {counts.short:,} too short, "
            f"{counts.other_split:,} of the other split, {counts.num_damaged:,} damaged"
        )


def window_shape(cache: Cache, settings: LoaderSettings) -> WindowShape:
    rows = cache.meta.spec.rows
    tokens = settings.seq_len + 1
    if rows is None:
        return WindowShape(tokens, settings.stride or settings.seq_len)
    if rows.tokens != tokens:
        raise UsageError(
            f"the cache holds rows of {rows.tokens} tokens, seq_len {settings.seq_len} needs {tokens}",
            hint=f"seq_len={rows.tokens - 1}, or build rows of {tokens}",
        )
    return WindowShape(tokens, tokens)


def _cut(parts: list[Part], first: int, last: int) -> list[Part]:
    """Windows first .. last - 1 of the parts."""
    taken, at = [], 0
    for part in parts:
        starts = part.starts[max(0, first - at) : max(0, last - at)]
        if len(starts):
            taken.append(Part(part.era, starts))
        at += len(part.starts)
    return taken


def _shares(parts: list[Part], firsts: range, share: int) -> list[Part]:
    """`share` windows from each index in `firsts` on."""
    return [part for first in firsts for part in _cut(parts, first, first + share)]

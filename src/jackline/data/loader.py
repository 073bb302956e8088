"""Batches of windows in a shuffled order that can be seeked: what a training loop uses.

    data = open_data(spec, settings, reporter)
    with Loader(data, LoaderSettings(seq_len=1024, batch_size=8, seed=1)) as loader:
        for batch in loader: ...                 # batch.tokens: [8, 1025]
        loader.state()                           # {"epoch": .., "position": .., ...} into the checkpoint
        loader.seek(state)                       # O(1), any number of threads before and after

Owns position, prefetching and the time spent waiting. The order depends on (seed, epoch, era) alone: never on timing,
threads, or how far the tokeniser has come. State is what was consumed, never what was fetched.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jackline.data.cache import Cache
from jackline.data.eras import WindowShape, locate, windows_before
from jackline.data.order import Blocks, Permutation, mix
from jackline.data.readers import Reading, Registration
from jackline.data.supply import Data, is_complete, is_era_ready
from jackline.data.windows import EraFiles, read_windows
from jackline.errors import CannotResume, JacklineError, UsageError


@dataclass(frozen=True)
class LoaderSettings:
    """What a batch is. `batch_size` is the global batch; a rank takes its slice of it."""

    seq_len: int
    batch_size: int
    stride: int | None = None  # None: windows share one token, the target of one is the first input of the next
    seed: int = 0
    shuffle: Literal["era", "none"] = "era"
    epochs: int | None = None  # None: for ever
    drop_last: bool = True
    rank: int = 0
    world_size: int = 1
    num_threads: int = 2
    num_prefetched: int = 4
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.batch_size < 1:
            raise UsageError(f"batches of {self.batch_size} x {self.seq_len} tokens cannot be read")
        if self.batch_size % self.world_size:
            raise UsageError(f"a batch of {self.batch_size} cannot be shared by {self.world_size} ranks")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} of {self.world_size} does not exist")


@dataclass(frozen=True)
class Batch:
    """`tokens[i]` is a window of seq_len + 1 tokens; input is [:, :-1], target [:, 1:]."""

    tokens: NDArray[Any]
    epoch: int
    position: int  # of the global batch's first window
    windows: NDArray[np.int64]  # first token of each window in the corpus: names the batch when it must be looked up


@dataclass(frozen=True)
class _Part:
    """Some rows of a batch out of one era."""

    era: int
    starts: NDArray[np.uint64]


@dataclass(frozen=True)
class _Plan:
    epoch: int
    position: int
    parts: tuple[_Part, ...]
    next_epoch: int
    next_position: int


class Loader:
    """An iterator over batches. One per rank; not shared between threads."""

    def __init__(self, data: Data, settings: LoaderSettings, state: dict[str, Any] | None = None) -> None:
        self.cache = data.cache
        self.settings = settings
        self._supply = data.supply
        self._shape = _shape(data.cache, settings)
        self._registration = Registration(data.cache.folder)
        self._pool = ThreadPoolExecutor(settings.num_threads, "jackline-load") if settings.num_threads else None
        self._files = threading.local()
        self._all_files: list[EraFiles] = []
        self._blocks: dict[tuple[int, int], Blocks] = {}
        self._pending: deque[tuple[_Plan, Future[Batch] | None]] = deque()
        self._epoch = self._planned_epoch = 0
        self._position = self._planned_position = 0
        self.waited_s = 0.0  # in all: the share of a step is the difference over it
        self._era = -1
        if state is not None:
            self.seek(state)
        else:
            self._enter_era(0)
        data.kept_place.remove()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        began_s = time.perf_counter()
        try:
            if not self._pending:
                self._plan_next(may_wait=True)
            plan, future = self._pending.popleft()
            batch = self._fill(plan) if future is None else future.result()
        finally:
            self.waited_s += time.perf_counter() - began_s
        self._epoch, self._position = plan.next_epoch, plan.next_position
        self._enter_era(locate(self._position, self.cache.plan, self._shape).era)
        while self._pool is not None and len(self._pending) < self.settings.num_prefetched:
            if not self._plan_next(may_wait=False):
                break
        return batch

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, and what proves that the data is the same when it is gone back to."""
        place = locate(self._position, self.cache.plan, self._shape)
        cursor = self.cache.ledger.cursor_at(place.era, len(self.cache.meta.spec.sources))
        before = self.cache.ledger.records.get(place.era - 1)
        return {
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self.cache.meta.fingerprint,
            "window": [self._shape.tokens, self._shape.stride],
            "seed": self.settings.seed,
            "shuffle": self.settings.shuffle,
            "era": place.era,
            "era_cursor": cursor.to_json() if cursor else None,
            "hash_before": before.hash if before else None,
        }

    def seek(self, state: dict[str, Any]) -> None:
        """Go to a state; refuses one that belongs to other data or another order."""
        _check_state(state, self)
        self._pending.clear()
        self._epoch = self._planned_epoch = int(state["epoch"])
        self._position = self._planned_position = int(state["position"])
        self._enter_era(locate(self._position, self.cache.plan, self._shape).era)

    def num_windows(self) -> int | None:
        """Windows of an epoch; None while the corpus is not finished."""
        last = self.cache.ledger.last_era
        if last is None:
            self.cache.ledger.refresh()
            last = self.cache.ledger.last_era
        if last is None:
            return None
        tokens = self.cache.num_tokens(last) or 0
        return windows_before(last, self.cache.plan, self._shape) + self._shape.count_in(tokens)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for files in self._all_files:
            files.close()
        self._registration.remove()

    def _enter_era(self, era: int) -> None:
        """Say where this reader is, by what it consumed, and see that somebody builds ahead of it."""
        if era == self._era:
            return
        self._era = era
        repeats = self.settings.epochs is None or self._epoch + 1 < self.settings.epochs
        self._registration.move_to(Reading(era, repeats))
        if not is_complete(self.cache):
            self._supply.start()

    def _plan_next(self, *, may_wait: bool) -> bool:
        """Plan one batch and begin to read it; False when that would have to wait or there is none."""
        plan = self._next_plan(may_wait)
        if plan is None:
            return False
        self._planned_epoch, self._planned_position = plan.next_epoch, plan.next_position
        future = None if self._pool is None else self._pool.submit(self._fill, plan)
        self._pending.append((plan, future))
        return True

    def _next_plan(self, may_wait: bool) -> _Plan | None:
        epoch, position = self._planned_epoch, self._planned_position
        while self.settings.epochs is None or epoch < self.settings.epochs:
            rows = self._rows_from(epoch, position, may_wait)
            if rows is None:
                return None
            parts, count = rows
            is_whole = count == self.settings.batch_size
            if is_whole or (count and not self.settings.drop_last):
                following = (epoch, position + count) if is_whole else (epoch + 1, 0)
                return _Plan(epoch, position, self._slice(parts, count), *following)
            if position == 0:
                raise self._too_small()
            epoch, position = epoch + 1, 0
        if may_wait:
            raise StopIteration
        return None

    def _rows_from(self, epoch: int, position: int, may_wait: bool) -> tuple[list[_Part], int] | None:
        """The windows at positions from `position` on, up to one batch; fewer at the end of the epoch."""
        parts: list[_Part] = []
        count = 0
        while count < self.settings.batch_size:
            place = locate(position + count, self.cache.plan, self._shape)
            if not is_era_ready(self.cache, place.era):
                if not may_wait:
                    return None
                self._wait_for(place.era)
            in_era = self._shape.count_in(self.cache.num_tokens(place.era) or 0)
            take = min(self.settings.batch_size - count, in_era - place.index)
            if take <= 0:
                break
            parts.append(_Part(place.era, self._starts(epoch, place.era, in_era, place.index, take)))
            count += take
        return parts, count

    def _wait_for(self, era: int) -> None:
        self._supply.wait_until(lambda: is_era_ready(self.cache, era), f"era {era} of the data")

    def _starts(self, epoch: int, era: int, n: int, index: int, count: int) -> NDArray[np.uint64]:
        """First tokens, inside the era, of `count` windows from `index` of its order."""
        if self.settings.shuffle == "none":
            return np.arange(index, index + count, dtype=np.uint64) * np.uint64(self._shape.stride)
        if (epoch, era) not in self._blocks:
            while len(self._blocks) > 1:  # the one before stays: a batch may lie across the border
                del self._blocks[next(iter(self._blocks))]
            self._blocks[epoch, era] = Blocks(Permutation(n, mix(self.settings.seed, epoch, era)))
        return self._blocks[epoch, era].take(index, count) * np.uint64(self._shape.stride)

    def _slice(self, parts: list[_Part], count: int) -> tuple[_Part, ...]:
        """This rank's rows of the global batch."""
        first = count * self.settings.rank // self.settings.world_size
        last = count * (self.settings.rank + 1) // self.settings.world_size
        taken, at = [], 0
        for part in parts:
            starts = part.starts[max(0, first - at) : max(0, last - at)]
            if len(starts):
                taken.append(_Part(part.era, starts))
            at += len(part.starts)
        return tuple(taken)

    def _fill(self, plan: _Plan) -> Batch:
        num_rows = sum(len(part.starts) for part in plan.parts)
        out = _buffer((num_rows, self._shape.tokens), self.cache.meta.dtype, self.settings.pin_memory)
        files = self._my_files()
        windows = np.empty(num_rows, np.int64)
        at = 0
        for part in plan.parts:
            end = at + len(part.starts)
            read_windows(self._fd(files, part.era), part.starts, out[at:end])
            windows[at:end] = part.starts.astype(np.int64) + self.cache.plan.start(part.era)
            at = end
        return Batch(out, plan.epoch, plan.position, windows)

    def _fd(self, files: EraFiles, era: int) -> int:
        while True:
            try:
                return files.fd(era)
            except FileNotFoundError:  # recycled since it was planned; it is built again
                self._wait_for(era)

    def _my_files(self) -> EraFiles:
        files: EraFiles | None = getattr(self._files, "files", None)
        if files is None:
            files = self._files.files = EraFiles(self.cache)
            self._all_files.append(files)
        return files

    def _too_small(self) -> JacklineError:
        total = self.cache.total_tokens() or 0
        return JacklineError(
            f"the data has {total:,} tokens: not enough for one batch of {self.settings.batch_size} windows of "
            f"{self._shape.tokens} tokens",
            hint="give more data, a smaller batch or a shorter sequence",
        )


def _shape(cache: Cache, settings: LoaderSettings) -> WindowShape:
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


def _buffer(shape: tuple[int, int], dtype: np.dtype[Any], pin_memory: bool) -> NDArray[Any]:
    if not pin_memory:
        return np.empty(shape, dtype)
    import torch

    # From torch's own pool of pinned memory: it knows when a copy to the GPU has finished with a buffer.
    raw = torch.empty(shape[0] * shape[1] * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
    pinned: NDArray[Any] = raw.numpy().view(dtype).reshape(shape)
    return pinned


def _check_state(state: dict[str, Any], loader: Loader) -> None:
    now = loader.state()
    for key in ("fingerprint", "window", "seed", "shuffle"):
        if state[key] != now[key]:
            raise CannotResume(
                f"the data of this checkpoint is not the data of this run: {key} was {state[key]}, is {now[key]}",
                hint="give the same source, tokenizer, seq_len and seed, or start a new run",
            )
    before = loader.cache.ledger.records.get(int(state["era"]) - 1)
    if before is not None and state["hash_before"] not in (None, before.hash):
        raise CannotResume(
            f"era {before.era} of the cache is not what this run was trained on: its hash is {before.hash[:12]}, "
            f"the checkpoint says {state['hash_before'][:12]}",
            hint="put the source back as it was, or start a new run",
        )

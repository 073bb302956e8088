"""Batches of windows in a shuffled, seekable order: what a training loop uses.

    data = open_data(spec, settings, reporter)
    with Loader(data, LoaderSettings(seq_len=1024, batch_size=8, seed=1)) as loader:
        for batch in loader: ...                 # batch.tokens: [8, 1025]
        loader.state()                           # {"epoch": .., "position": .., ...} into the checkpoint
        loader.seek(state)                       # O(1), any number of threads before and after

Owns position, prefetching and the time spent waiting. The order depends on (seed, epoch, era) alone: never on timing,
threads, or how far the tokeniser has come. The state counts what was consumed, never what was prefetched.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jackline.data.build.supply import Data, is_era_ready, is_running_low
from jackline.data.cache.readers import Reading, Registration
from jackline.data.cache.windows import EraFiles, read_windows
from jackline.data.loader.batches import empty_buffer
from jackline.data.loader.jobs import End, Job, LoaderSettings, NotReady, Planner
from jackline.errors import CannotResume

__all__ = ["Batch", "Loader", "LoaderSettings"]


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens[i]` is a window of seq_len + 1 tokens; input is [:, :-1], target [:, 1:]."""

    tokens: NDArray[Any]
    epoch: int
    position: int  # of the global batch's first window
    windows: NDArray[np.int64]  # first token of each window in the corpus: identifies the batch for a later look-up


@dataclass(slots=True)
class _Filled:
    """A job that was read, and how many of its batches were returned."""

    job: Job
    tokens: NDArray[Any]
    windows: NDArray[np.int64]
    num_given: int = 0


class Loader:
    """An iterator over batches. One per rank; not shared between threads."""

    def __init__(self, data: Data, settings: LoaderSettings, state: dict[str, Any] | None = None) -> None:
        self.cache = data.cache
        self.settings = settings
        self.waited_s = 0.0  # total; the time of one step is the difference before and after it
        self._supply = data.supply
        self._eras_ahead = data.eras_ahead
        self._ready: set[int] = set()
        self._waiting = threading.Lock()
        self._planner = Planner(data.cache, settings, self._is_ready)
        self._registration = Registration(data.cache.folder)
        self._pool = ThreadPoolExecutor(settings.num_threads, "jackline-load") if settings.num_threads else None
        self._mine = threading.local()
        self._all_files: list[EraFiles] = []
        self._coming: deque[Future[_Filled]] = deque()
        self._now: _Filled | None = None
        self._epoch = self._position = 0
        self._planned = (0, 0)
        self._num_batches = 1  # of the next job: small at first, so that the first batch comes at once
        self._reading = Reading(-1, repeats=False)
        if state is None:
            self._enter_era(0)
        else:
            self.seek(state)
        data.kept_place.remove()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        now = self._now
        if now is None:
            began_s = time.perf_counter()
            try:
                now = self._now = self._next_filled()
            finally:
                self.waited_s += time.perf_counter() - began_s
        job, number = now.job, now.num_given
        rows, step = job.rows_per_batch, self.settings.batch_size
        first = number * rows
        tokens, windows = now.tokens[first : first + rows], now.windows[first : first + rows]
        now.num_given += 1
        position = job.position + number * step
        if position + step >= job.position + job.num_windows:
            self._now = None
            self._epoch, self._position = job.next_epoch, job.next_position
        else:
            self._epoch, self._position = job.epoch, position + step
        if number == 0 or self._now is None:
            self._enter_era(self._planner.era_at(self._position))
        return Batch(tokens, job.epoch, position, windows)

    def state(self) -> dict[str, Any]:
        """Where the next batch begins, and what verifies on resume that the data is the same."""
        epoch, position = self._planner.normal(self._epoch, self._position)
        era = self._planner.era_at(position)
        ledger, meta = self.cache.ledger, self.cache.meta
        cursor = ledger.cursor_at(era, len(meta.spec.sources))
        before = ledger.records.get(era - 1)
        return {
            "epoch": epoch,
            "position": position,
            "fingerprint": meta.fingerprint,
            "tokenizer_hash": meta.tokenizer_hash,
            "window": [self._planner.shape.tokens, self._planner.shape.stride],
            "seed": self.settings.seed,
            "shuffle": self.settings.shuffle,
            "era": era,
            "era_cursor": cursor.to_json() if cursor else None,
            "hash_before": before.hash if before else None,
        }

    def seek(self, state: dict[str, Any]) -> None:
        """Go to a state; raise if it belongs to other data or another order."""
        _check_state(state, self)
        while self._coming:
            self._coming.popleft().cancel()
        self._now, self._num_batches = None, 1
        self._epoch, self._position = self._planned = int(state["epoch"]), int(state["position"])
        self._enter_era(self._planner.era_at(self._position))

    def place(self) -> dict[str, Any]:
        """The epoch, the batch, and the number of batches (None while the corpus is not finished), counted from 1."""
        windows, size = self._planner.num_windows(), self.settings.batch_size
        done = -(-self._position // size)
        return {"epoch": self._epoch + 1, "batch": done, "num_batches": None if windows is None else windows // size}

    def num_windows(self) -> int | None:
        """Windows of an epoch; None while the corpus is not finished."""
        if not self.cache.ledger.is_sealed:
            self.cache.ledger.refresh()
        return self._planner.num_windows()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        for files in self._all_files:
            files.close()
        self._registration.remove()
        self._supply.stop()

    def _next_filled(self) -> _Filled:
        if self._pool is None:
            return self._fill(self._plan_or_wait())
        if not self._coming:
            self._coming.append(self._pool.submit(self._fill, self._plan_or_wait()))
        # Start the jobs after this one before waiting for it, as far as they can be planned now.
        while len(self._coming) <= self.settings.num_prefetched and isinstance(job := self._plan(), Job):
            self._coming.append(self._pool.submit(self._fill, job))
        return self._coming.popleft().result()

    def _plan(self) -> Job | NotReady | End:
        job = self._planner.plan(*self._planned, self._num_batches)
        if isinstance(job, Job):
            self._num_batches = min(2 * self._num_batches, self._planner.max_batches)
            self._planned = job.next_epoch, job.next_position
        return job

    def _plan_or_wait(self) -> Job:
        while isinstance(job := self._plan(), NotReady):
            self._wait_for(job.era)
        if isinstance(job, End):
            raise StopIteration
        return job

    def _wait_for(self, era: int) -> None:
        """Until the era is built. One thread at a time: a reader is registered with one era that it waits for, and a
        second one would take the first one's place."""
        with self._waiting:
            self._ready.discard(era)
            self._registration.move_to(replace(self._reading, waits_for=era))
            self._supply.wait_until(lambda: is_era_ready(self.cache, era), f"era {era} of the data")
            self._registration.move_to(self._reading)

    def _is_ready(self, era: int) -> bool:
        """Called for every job, but looked up on disk once per era. Opening an era that was recycled since fails."""
        if era in self._ready:
            return True
        is_ready = is_era_ready(self.cache, era)
        if is_ready and self.cache.num_tokens(era):
            self._ready.add(era)
        return is_ready

    def _enter_era(self, era: int) -> None:
        """Register where this reader is, by what it consumed, and ensure that a builder works ahead of it."""
        repeats = self.settings.epochs is None or self._epoch + 1 < self.settings.epochs
        reading = Reading(era, repeats)
        if reading != self._reading:
            self._reading = reading
            self._registration.move_to(reading)
            if is_running_low(self.cache, reading, self._eras_ahead):
                self._supply.start()

    def _fill(self, job: Job) -> _Filled:
        num_rows = sum(len(part.starts) for part in job.parts)
        shape = (num_rows, self._planner.shape.tokens)
        out = empty_buffer(shape, self.cache.meta.dtype, pin_memory=self.settings.pin_memory)
        windows = np.empty(num_rows, np.int64)
        files = self._my_files()
        at = 0
        for part in job.parts:
            end = at + len(part.starts)
            read_windows(self._fd(files, part.era), part.starts, out[at:end])
            np.add(part.starts, np.uint64(self.cache.plan.start(part.era)), out=windows[at:end], casting="unsafe")
            at = end
        return _Filled(job, out, windows)

    def _fd(self, files: EraFiles, era: int) -> int:
        while True:
            try:
                return files.fd(era)
            except FileNotFoundError:  # recycled since it was planned; it is built again
                self._wait_for(era)

    def _my_files(self) -> EraFiles:
        files: EraFiles | None = getattr(self._mine, "files", None)
        if files is None:
            files = self._mine.files = EraFiles(self.cache)
            self._all_files.append(files)
        return files


def _check_state(state: dict[str, Any], loader: Loader) -> None:
    now = loader.state()
    for key in ("fingerprint", "tokenizer_hash", "window", "seed", "shuffle"):
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

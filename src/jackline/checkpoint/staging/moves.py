"""Copies within host memory, by as many threads as have time.

The copy beside a step must be over before the step changes anything. Whoever has time takes the next part: one thread
of the engine's own, more where the training leaves cores free, and the loop itself when it has come to the barrier,
instead of waiting there. Owns that. Does not know what is copied (stage.py).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence

import torch

from jackline.checkpoint.format.parallel import run_in_threads

_PART_BYTES = 64 << 20
_MAX_THREADS = 4
Move = tuple[int, int, int]  # to address, from address, bytes


class Moving:
    """Some moves under way. Any number of threads may call `help`; `over` is set when everything is there."""

    def __init__(self, moves: Sequence[Move] = ()) -> None:
        self._parts = split_moves(sorted(moves))
        self._is_done = [False] * len(self._parts)
        self._num_taken = 0
        self._num_done = 0
        self._lowest = 0  # the first part that is not there
        self._lock = threading.Lock()
        self.over = threading.Event()
        if not self._parts:
            self.over.set()  # else the barrier would wait until a thread got its turn to say so

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def run(self, on_progress: Callable[[int], None] = lambda address: None) -> None:
        """Ends it, with more threads where cores are free. `on_progress`: up to which address everything is there."""
        if self._parts:
            on_progress(self._parts[0][0])
            for _ in range(min(spare_cores(), len(self._parts)) - 1):
                threading.Thread(target=self.help, daemon=True, name="jackline-copy").start()
            self.help(on_progress)
        self.over.wait()

    def help(self, on_progress: Callable[[int], None] = lambda address: None) -> None:
        """Copies until nothing is left to take; others may still be at their last part."""
        while (number := self._take()) is not None:
            _move(self._parts[number])
            on_progress(self._end(number))

    def _take(self) -> int | None:
        with self._lock:
            if self._num_taken == len(self._parts):
                return None
            self._num_taken += 1
            return self._num_taken - 1

    def _end(self, number: int) -> int:
        with self._lock:
            self._is_done[number] = True
            self._num_done += 1
            while self._lowest < len(self._parts) and self._is_done[self._lowest]:
                self._lowest += 1
            if self._num_done == len(self._parts):
                self.over.set()
            to, _, size = self._parts[min(self._lowest, len(self._parts) - 1)]
            return to if self._lowest < len(self._parts) else to + size


def copy_memory(moves: Sequence[Move], *, num_threads: int | None = None) -> None:
    """memmove for each, by several threads when there is much.

    Twice as fast as Tensor.copy_ here (12 against 6 GB/s), and the GIL is free meanwhile.
    """
    run_in_threads(_move, split_moves(moves), copy_threads() if num_threads is None else num_threads)


def split_moves(moves: Sequence[Move]) -> list[Move]:
    """Parts of at most 64 MB."""
    return [
        (to + start, source + start, min(_PART_BYTES, size - start))
        for to, source, size in moves
        for start in range(0, size, _PART_BYTES)
    ]


def _move(part: Move) -> None:
    ctypes.memmove(*part)


def copy_threads() -> int:
    """A few: below about 24 MB the C library copies through the cache, and one thread then gets half the speed."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def spare_cores() -> int:
    """How many threads may copy beside a step: what torch's own threads leave free, at least one."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) - torch.get_num_threads()))

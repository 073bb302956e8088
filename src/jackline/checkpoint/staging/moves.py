"""Copies within host memory: immediately, or during a step in as many threads as have time.

Immediately (`copy_at_once`): the loop waits. When no other Python threads are alive, several threads copy. When there
are some, one call copies everything and keeps the GIL, so that none of them can start to change a tensor meanwhile.
During a step (`Moving`): the copy must be over before the step changes anything. One thread of the engine copies,
more where the training leaves cores free, and the loop itself once it has reached the barrier. A tensor's memory may
be freed during that copy (`untyped_storage().resize_`): so the kernel copies, and returns EFAULT where memmove would
crash.
Does not know what is copied (stage.py).
"""

from __future__ import annotations

import collections
import ctypes
import errno
import gc
import os
import threading
from collections.abc import Callable, Sequence

import torch

from jackline.checkpoint.format.parallel import run_in_threads
from jackline.machine.waits import thread_frames

_PART_BYTES = 64 << 20
_MAX_THREADS = 4
# About two seconds: other threads, our own heartbeat among them, do not run while the GIL is kept.
_KEPT_BYTES = 16 << 30
OUR_THREADS = "jackline-"
Move = tuple[int, int, int]  # destination address, source address, bytes


class FreedMemory(Exception):
    """The memory that was being copied has been freed."""


class _Stretch(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_memmove_with_gil = ctypes.PyDLL(None).memmove
_memmove_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_with_gil.restype = None
_copy_by_kernel = ctypes.CDLL(None, use_errno=True).process_vm_readv
_copy_by_kernel.restype = ctypes.c_ssize_t
_copy_by_kernel.argtypes = (
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
)


class Moving:
    """A set of copies in progress. Any number of threads may call `help`; `over` is set when all bytes are copied.

    `is_broken`: memory was freed before it was copied.
    """

    def __init__(self, moves: Sequence[Move] = ()) -> None:
        self._parts = split_moves(sorted(moves))
        self._is_done = [False] * len(self._parts)
        self._num_taken = 0
        self._num_done = 0
        self._lowest = 0  # the first part that is not copied yet
        self._lock = threading.Lock()
        self.is_broken = False
        self.over = threading.Event()
        if not self._parts:
            self.over.set()  # otherwise the barrier would wait until a thread was scheduled to set it

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def run(self, on_progress: Callable[[int], None] = lambda address: None) -> None:
        """Finish the copies, with more threads where cores are free.

        `on_progress`: all bytes below this address are copied.
        """
        if self._parts:
            on_progress(self._parts[0][0])
            for _ in range(min(spare_cores(), len(self._parts)) - 1):
                threading.Thread(target=self.help, daemon=True, name="jackline-copy").start()
            self.help(on_progress)
        self.over.wait()

    def help(self, on_progress: Callable[[int], None] = lambda address: None) -> None:
        """Copy until no part is left to take; other threads may still be copying their last part."""
        while (number := self._take()) is not None:
            try:
                _move(self._parts[number])
            except FreedMemory:
                self.is_broken = True
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


def copy_at_once(moves: Sequence[Move]) -> None:
    """Copy everything before returning.

    Raises FreedMemory if another thread freed a tensor (very large states only).
    """
    if not has_other_threads():
        copy_memory(moves)
    elif sum(size for _, _, size in moves) <= _KEPT_BYTES:
        copy_with_gil(moves)
    else:
        run_in_threads(_move, split_moves(moves), copy_threads())


def copy_memory(moves: Sequence[Move], *, num_threads: int | None = None) -> None:
    """memmove each, in several threads when there is much to copy.

    Twice as fast as Tensor.copy_ here (12 against 6 GB/s), and it releases the GIL.
    """
    wanted = copy_threads() if num_threads is None else num_threads
    run_in_threads(_memmove, split_moves(moves), wanted)


def copy_with_gil(moves: Sequence[Move]) -> None:
    """Copy without letting any other Python thread run from the first byte to the last.

    A loop in Python would release the GIL between two moves. `deque` consumes `map` in C, where nothing releases it,
    except a garbage collection that runs a finalizer.
    """
    columns = [list(column) for column in zip(*moves, strict=True)]
    if not columns:
        return
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        collections.deque(map(_memmove_with_gil, *columns), maxlen=0)
    finally:
        if was_collecting:
            gc.enable()


def has_other_threads() -> bool:
    """Whether Python threads are alive that are neither this one nor Jackline's."""
    ours = {thread.ident for thread in threading.enumerate() if thread.name.startswith(OUR_THREADS)}
    return any(ident not in ours for ident in thread_frames() if ident != threading.get_ident())


def split_moves(moves: Sequence[Move]) -> list[Move]:
    """Parts of at most 64 MB."""
    return [
        (to + start, source + start, min(_PART_BYTES, size - start))
        for to, source, size in moves
        for start in range(0, size, _PART_BYTES)
    ]


def _memmove(part: Move) -> None:
    ctypes.memmove(*part)


def _move(part: Move) -> None:
    """Copy through the kernel, which checks that the memory exists; by memmove where a sandbox forbids that call."""
    to, source, size = part
    done = 0
    while done < size:
        here, there = _Stretch(to + done, size - done), _Stretch(source + done, size - done)
        count = _copy_by_kernel(os.getpid(), ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)
        if count < 0 and ctypes.get_errno() == errno.EFAULT:
            raise FreedMemory
        if count <= 0:
            ctypes.memmove(to + done, source + done, size - done)
            return
        done += count


def copy_threads() -> int:
    """A few: below about 24 MB the C library copies through the cache, and one thread then gets half the speed."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def spare_cores() -> int:
    """How many threads may copy during a step: the cores that torch's own threads leave free, at least one."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) - torch.get_num_threads()))

"""Copying a state into the arena: immediately, or during the next forward and backward pass.

Immediate copies are for a loop that has declared nothing. They save the state of that instant, whatever the loop does
next: host tensors are in the arena before `begin` returns. GPUs are drained first, and `begin` returns when each has
gathered its tensors (lane.py), so that no stream can write into them. Only the transfer over the bus remains then.
Overlapped copies are for a loop that declares where its state changes (our trainer): weights and optimizer state are
copied while the next gradients are computed, and one barrier before the change makes the copy exact.
Storages are held until their copy is over, so that rebinding a tensor does not free memory that is being copied. Owns
the host's copies, the barrier and the check that nothing changed meanwhile (tensor versions, storage addresses).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jackline.checkpoint.staging.arena import Arena
from jackline.checkpoint.staging.gather import GpuCopies, Span
from jackline.checkpoint.staging.lane import Lane, drain, let_wait
from jackline.checkpoint.staging.layout import Layout
from jackline.checkpoint.staging.moves import FreedMemory, Move, Moving, copy_at_once
from jackline.checkpoint.staging.pages import HugePages
from jackline.checkpoint.state.capture import Source
from jackline.checkpoint.state.dtypes import as_stored
from jackline.units import format_bytes

_LITTLE_BYTES = 1 << 20
_SOME = "a tensor"  # used when it is not known which one


class _Part(NamedTuple):
    """One tensor as it was: its storage, kept alive; the storage's address and length; the tensor's version."""

    source: Source
    storage: torch.UntypedStorage
    address: int
    length: int
    version: int


class Held:
    """Tensors that are being copied, and whether they are still unchanged."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._parts: list[_Part] = []
        for source in sources:
            storage = source.tensor.untyped_storage()
            place = storage.data_ptr(), storage.nbytes()
            self._parts.append(_Part(source, storage, *place, read_version(source.tensor)))

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def keep_only(self, numbers: Sequence[int]) -> None:
        """Release all others: they are copied, so they may be freed and may change."""
        self._parts = [self._parts[n] for n in numbers]

    def find(self, number: int) -> tuple[int, int]:
        """Address and size in bytes, from the held storage: the tensor itself may have another storage by now."""
        part = self._parts[number]
        tensor = part.source.tensor
        size = tensor.numel() * tensor.element_size()
        offset = int(tensor.storage_offset()) * tensor.element_size()
        if size and offset + size > part.length:
            raise FreedMemory
        return part.address + offset, size

    def first_changed(self) -> str:
        """The name of a tensor that was changed or whose memory was resized; empty when there is none."""
        for source, storage, address, length, version in self._parts:
            is_there = storage.data_ptr() == address and storage.nbytes() == length
            if not is_there or read_version(source.tensor) != version:
                return f"{source.key}.{source.name}"
        return ""


@dataclass
class Staging:
    """One state being copied. The loop calls `barrier`, whoever waits for the copy calls `finish`, in any order."""

    held: Held | None  # what is read after `begin`; kept alive until it is copied
    moving: Moving = field(default_factory=Moving)  # the deferred tensors in host memory
    gathered: list[tuple[torch.device, Any]] = field(default_factory=list)  # events: this GPU has read its tensors
    lanes: list[Lane] = field(default_factory=list)  # GPUs that have not sent everything to the arena yet
    drained_s: float = 0.0  # time spent waiting for work that the loop itself had enqueued
    afterwards: Callable[[], Any] = lambda: None  # what makes the next copy cheaper
    changed: str | None = None  # a tensor that changed during the copy; empty: none did; None: not checked yet
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_torn(self) -> bool:
        return bool(self.changed)

    def barrier(self) -> None:
        """Call it before any deferred tensor changes.

        Helps with the host copies and makes the GPU wait for its own copies.
        """
        self.moving.help()
        self.moving.over.wait()
        for device, event in self.gathered:
            let_wait(device, event)
        self.judge()

    def finish(self, on_progress: Callable[[int], None] = lambda address: None) -> bool:
        """Finish the copy; True when the arena holds the state of the instant of `begin`.

        `on_progress` is called with the address below which everything is copied, so that writing can start before
        copying ends.
        """
        self.moving.run(on_progress)
        self.wait_for_gpu()
        self.judge()
        self.held = None
        self.afterwards()
        return not self.is_torn

    def wait_for_gpu(self) -> None:
        """Wait until everything from the GPUs is in the arena."""
        for event in [lane.send() for lane in self.lanes]:
            event.synchronize()

    def judge(self) -> None:
        """Check once; the first caller's result holds.

        The barrier runs before a permitted change, `finish` maybe after it.
        """
        with self._lock:
            if self.changed is not None:
                return
            self.changed = self.held.first_changed() if self.held is not None else ""
            if self.moving.is_broken and not self.changed:
                self.changed = _SOME


class Stager:
    """Copies into one arena. Keeps a lane for every GPU. `tell` reports how much GPU memory that takes."""

    def __init__(
        self, arena: Arena, copies: GpuCopies | None = None, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self._arena = arena
        self._copies = copies or GpuCopies()
        self._tell = tell
        self._layout: Layout | None = None
        self._lanes: dict[torch.device, Lane] = {}
        self._host: list[int] = []
        self._pages = HugePages()

    @torch.no_grad()
    def prepare(self, layout: Layout, sources: Sequence[Source]) -> None:
        """Make what the first save would otherwise make: memory on the GPU, and a view for every tensor there."""
        if any(lane.is_short for lane in self._lanes.values()):
            self.give_back()
        if layout is self._layout:
            return
        self.close()
        self._layout, self._host = layout, []
        spans: dict[torch.device, list[Span]] = {}
        for n, (_, _, tensor, _) in enumerate(sources):
            if tensor.device.type in self._copies.kinds:
                size = tensor.numel() * tensor.element_size()
                spans.setdefault(tensor.device, []).append(Span(n, layout.arena[n], size))
            else:
                self._host.append(n)
        for device, of_device in spans.items():
            lane = Lane(device, of_device, sources, self._arena.tensor, self._copies)
            self._lanes[device] = lane
            if lane.describe():
                self._tell(lane.describe())

    @torch.no_grad()
    def begin(self, layout: Layout, sources: Sequence[Source], *, is_overlapped: bool) -> Staging:
        """Start the copy. Overlapped: copy now what may change at any moment and start the rest. Else: copy all now.

        When nothing is deferred, whether another thread changed something meanwhile is checked immediately.
        """
        self.prepare(layout, sources)
        return self._begin_beside(layout, sources) if is_overlapped else self._begin_at_once(layout, sources)

    def _begin_at_once(self, layout: Layout, sources: Sequence[Source]) -> Staging:
        began_s = time.perf_counter()
        drain(self._lanes)
        staging = Staging(held := Held(sources), drained_s=time.perf_counter() - began_s)
        self._start_lanes(staging, sources, is_overlapped=False)
        if not self._copy_now(layout, sources, held, self._host):
            staging.changed = _SOME
        for _, event in staging.gathered:
            event.synchronize()
        staging.judge()
        staging.held = None
        return staging

    def _begin_beside(self, layout: Layout, sources: Sequence[Source]) -> Staging:
        later = [n for n in self._host if sources[n].is_deferred and is_plain_memory(sources[n].tensor)]
        if self._is_little([sources[n].tensor for n in later]):
            later = []
        waiting = set(later)
        now = [n for n in self._host if n not in waiting]
        staging = Staging(held := Held(sources))
        self._start_lanes(staging, sources, is_overlapped=True)
        if not self._copy_now(layout, sources, held, now):
            staging.changed = _SOME
        moves = [self._move(layout, held, n) for n in later]
        staging.moving = Moving(moves)
        staging.afterwards = lambda: self._pages.want([(source, size) for _, source, size in moves])
        held.keep_only([*later, *(n for lane in self._lanes.values() for n in lane.deferred(sources))])
        return staging

    def _start_lanes(self, staging: Staging, sources: Sequence[Source], *, is_overlapped: bool) -> None:
        for device, lane in self._lanes.items():
            staging.gathered.append((device, lane.begin(sources, is_overlapped=is_overlapped)))
            staging.lanes.append(lane)

    def _copy_now(self, layout: Layout, sources: Sequence[Source], held: Held, numbers: Sequence[int]) -> bool:
        """Copy into the arena before returning. False when memory was freed during the copy."""
        moves: list[Move] = []
        try:
            for n in numbers:
                tensor = sources[n].tensor
                if is_plain_memory(tensor):
                    moves.append(self._move(layout, held, n))
                else:
                    self._view(layout, n, tensor).copy_(as_stored(tensor))
            copy_at_once(moves)
        except FreedMemory:
            return False
        return True

    def _move(self, layout: Layout, held: Held, number: int) -> Move:
        source, size = held.find(number)
        return self._arena.address + layout.arena[number], source, size

    def give_back(self) -> int:
        """Keep no copy of the state on the GPU from now on; return how many bytes that frees."""
        freed = sum(lane.taken_bytes for lane in self._lanes.values() if lane.way == "whole")
        if freed:
            self._tell(f"GPU memory is short: gave back the {format_bytes(freed)} that saves had taken of it")
            self._copies, self._layout = replace(self._copies, way="bounce"), None
            self.close()
        return freed

    def close(self) -> None:
        """Free the GPU's memory."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}

    def _is_little(self, deferred: Sequence[Tensor]) -> bool:
        """Whether no GPU copy is deferred and the host would defer too little to matter (an optimizer's counters)."""
        is_whole = bool(self._lanes) and all(lane.way == "whole" for lane in self._lanes.values())
        return is_whole and sum(tensor.numel() * tensor.element_size() for tensor in deferred) <= _LITTLE_BYTES

    def _view(self, layout: Layout, n: int, tensor: Tensor) -> Tensor:
        """The tensor's place in the arena, as a view with its dtype and shape."""
        stored = as_stored(tensor)
        start = layout.arena[n]
        flat = self._arena.tensor[start : start + stored.numel() * stored.element_size()]
        return flat.view(stored.dtype).view(stored.shape)


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether its bytes in host memory are the bytes that a file would hold."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy


def read_version(tensor: Tensor) -> int:
    """Torch counts every in-place change of a tensor. Inference tensors have no count and do not change."""
    return 0 if tensor.is_inference() else tensor._version

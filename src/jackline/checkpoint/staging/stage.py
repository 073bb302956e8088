"""Copying a state into the arena: at once, or beside the next forward and backward pass.

Weights, optimizer state and averages change only where the loop declares it, so their copy may run while the next
gradients are computed; one barrier before the change makes it exact. Everything else is copied before `begin`
returns. What lies on a GPU goes its own way (lane.py) and the barrier is a wait between streams: the host does not
stop. Owns the host's copies, the barrier and the proof that nothing changed meanwhile (tensor versions).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from jackline.checkpoint.staging.arena import Arena
from jackline.checkpoint.staging.gather import GpuCopies, Span
from jackline.checkpoint.staging.lane import Lane, let_wait
from jackline.checkpoint.staging.layout import Layout
from jackline.checkpoint.staging.moves import Move, Moving, copy_memory
from jackline.checkpoint.state.capture import Source
from jackline.checkpoint.state.dtypes import as_stored
from jackline.units import format_bytes

_LITTLE_BYTES = 1 << 20


@dataclass
class Staging:
    """One state on its way. `barrier` is for the loop, `finish` for whoever waits for the copy, in any order."""

    tensors: list[Tensor]  # deferred ones; kept alive until they are copied
    versions: list[int]
    moving: Moving = field(default_factory=Moving)  # of what is deferred in host memory
    gathered: list[tuple[torch.device, Any]] = field(default_factory=list)  # events: a GPU has read its tensors
    lanes: list[Lane] = field(default_factory=list)  # GPUs that have not sent all to the arena
    is_at_once: bool = False  # nothing would be deferred, so a loop has nothing to prove
    is_torn: bool | None = None  # None: not judged yet
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def barrier(self) -> None:
        """Before anything that was deferred changes. Helps with host copies, lets the GPU wait for its own."""
        self.moving.help()
        self.moving.over.wait()
        for device, event in self.gathered:
            let_wait(device, event)
        self._judge()

    def finish(self, on_progress: Callable[[int], None] = lambda address: None) -> bool:
        """Ends the copy; True when what is in the arena is the state of the instant of `begin`.

        `on_progress` hears up to which address everything is there, so that writing can start before copying ends.
        """
        self.moving.run(on_progress)
        self.wait_for_gpu()
        self._judge()
        return not self.is_torn

    def wait_for_gpu(self) -> None:
        """Until all that GPUs have is in the arena."""
        for event in [lane.send() for lane in self.lanes]:
            event.synchronize()

    def _judge(self) -> None:
        """The first caller's verdict holds: the barrier comes before a rightful change, `finish` maybe after it."""
        with self._lock:
            if self.is_torn is None:
                self.is_torn = read_versions(self.tensors) != self.versions


class Stager:
    """Copies into one arena. Keeps a lane for every GPU. `tell` hears what that takes of the GPU's memory."""

    def __init__(
        self, arena: Arena, copies: GpuCopies | None = None, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self._arena = arena
        self._copies = copies or GpuCopies()
        self._tell = tell
        self._layout: Layout | None = None
        self._lanes: dict[torch.device, Lane] = {}
        self._host: list[int] = []

    @torch.no_grad()
    def prepare(self, layout: Layout, sources: Sequence[Source]) -> None:
        """What the first save would else have to make: memory on the GPU, and a view for every tensor there."""
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
        """Copies what may change at any moment; starts the rest."""
        self.prepare(layout, sources)
        later = [n for n in self._host if sources[n].is_deferred]
        is_at_once = self._is_at_once([sources[n].tensor for n in later])
        if is_at_once or not is_overlapped:
            later = []
        tensors = [sources[n].tensor for n in later]
        if is_overlapped:
            tensors += [tensor for lane in self._lanes.values() for tensor in lane.deferred(sources)]
        staging = Staging(tensors, read_versions(tensors), is_at_once=is_at_once)
        for device, lane in self._lanes.items():
            staging.gathered.append((device, lane.begin(sources, is_overlapped=is_overlapped)))
            staging.lanes.append(lane)
        waiting = set(later)
        now: list[Move] = []
        deferred: list[Move] = []
        for n in self._host:
            tensor = sources[n].tensor
            if not is_plain_memory(tensor):
                self._view(layout, n, tensor).copy_(as_stored(tensor))
            else:
                size = tensor.numel() * tensor.element_size()
                moves = deferred if n in waiting else now
                moves.append((self._arena.address + layout.arena[n], tensor.data_ptr(), size))
        copy_memory(now)
        staging.moving = Moving(deferred)
        return staging

    def give_back(self) -> int:
        """Does without a copy of the state on the GPU from now on; how many bytes that frees."""
        freed = sum(lane.taken_bytes for lane in self._lanes.values() if lane.way == "whole")
        if freed:
            self._tell(f"GPU memory is short: gave back the {format_bytes(freed)} that saves had taken of it")
            self._copies, self._layout = replace(self._copies, way="bounce"), None
            self.close()
        return freed

    def close(self) -> None:
        """Gives the GPU's memory back."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}

    def _is_at_once(self, deferred: Sequence[Tensor]) -> bool:
        """Whether GPUs need no patience and what the host would defer is not worth it (counters of an optimizer)."""
        is_whole = bool(self._lanes) and all(lane.way == "whole" for lane in self._lanes.values())
        return is_whole and sum(tensor.numel() * tensor.element_size() for tensor in deferred) <= _LITTLE_BYTES

    def _view(self, layout: Layout, n: int, tensor: Tensor) -> Tensor:
        """The arena as a tensor of that kind and shape."""
        stored = as_stored(tensor)
        start = layout.arena[n]
        flat = self._arena.tensor[start : start + stored.numel() * stored.element_size()]
        return flat.view(stored.dtype).view(stored.shape)


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether its bytes lie in host memory as they would lie in a file."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy


def read_versions(tensors: Sequence[Tensor]) -> list[int]:
    """Torch counts every in-place change of a tensor. Inference tensors have no count and do not change."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

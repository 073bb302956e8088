"""One GPU's path into the arena: a stream of its own, the GPU memory it takes, and the events others wait for.

With a copy of the whole state on the GPU ('whole'), everything is gathered on the computation's own stream, and the
loop may change its tensors as soon as the call returns. From there the data crosses the bus in legs; each leg is
enqueued when the one before has arrived. While more of one stream is queued for the bus, no other copy gets it: a
value that the loop logged, or its loss.item(), waited 27 ms for 1.5 GB, and the computation waited with it. With legs
a logged value waits 2 to 4 ms. With two legs under way at a time it was no better than one copy.
Without that copy, deferred tensors are copied on the lane's own stream, batch by batch through a small buffer. Within
one stream the next batch waits for the last by itself, and gathering costs a thirtieth of sending, so a second buffer
would gain nothing. A loop that has declared nothing may write from any stream, so the device is drained before its
state is gathered, and the loop waits for the gathering.
Owns order and waiting on the GPU; gather.py owns what is copied where.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jackline import accelerator
from jackline.checkpoint.staging.gather import Crate, GpuCopies, Span, Way, choose_way, is_short, plan_batches
from jackline.checkpoint.state.capture import Source
from jackline.checkpoint.state.dtypes import as_stored
from jackline.units import format_bytes

_NEXT_BEST: dict[Way, Way] = {"whole": "bounce", "bounce": "none"}


@dataclass(frozen=True)
class _Leg:
    """Tensors that are copied one after another on one stream: large ones separately, then the batches."""

    alone: list[tuple[int, Tensor]]  # index, and its view of the arena
    crates: list[Crate]


class Lane:
    """The path of one device for one layout. `arena` is the whole arena as bytes."""

    def __init__(
        self,
        device: torch.device,
        spans: Sequence[Span],
        sources: Sequence[Source],
        arena: Tensor,
        copies: GpuCopies,
    ) -> None:
        self.size_bytes = sum(span.size_bytes for span in spans)
        is_limited = accelerator.is_gpu(device) and copies.is_limited(device)
        self.way: Way = choose_way(copies, self.size_bytes, copies.free_bytes(device), is_limited=is_limited)
        self._device = device
        self._copies = copies
        self._arena = arena
        self._side = _kit(device).Stream(device) if accelerator.is_gpu(device) else torch.cpu.Stream()
        self._copied: Any = None
        self._unsent: list[Crate] = []
        self._sending = threading.Lock()
        self._legs: dict[bool, tuple[_Leg, _Leg]] = {}
        self._spans = spans
        self._buffer = self._allocate()
        for is_overlapped in (True, False):
            self._plan(is_overlapped, sources)

    @property
    def is_short(self) -> bool:
        """Whether the memory of 'whole' must be freed now."""
        return self.way == "whole" and is_short(self._copies, self.size_bytes, self._copies.free_bytes(self._device))

    @property
    def _most_bytes(self) -> int | None:
        return {"whole": None, "bounce": self._copies.batch_bytes, "none": 0}[self.way]

    @property
    def taken_bytes(self) -> int:
        return self._buffer.numel()

    def describe(self) -> str:
        """The GPU memory it takes, as text for people; empty when it takes none."""
        taken = format_bytes(self.taken_bytes)
        if self.way == "whole":
            return f"saves keep a copy of the state on the GPU ({taken}), so training does not wait for the bus"
        return f"saves gather small tensors on the GPU ({taken})" if self.way == "bounce" else ""

    def deferred(self, sources: Sequence[Source]) -> list[int]:
        """Indices of the tensors that an overlapped save reads later and that must not change until then."""
        if self.way == "whole":
            return []
        return [span.number for span in self._spans if sources[span.number].is_deferred]

    def begin(self, sources: Sequence[Source], *, is_overlapped: bool) -> Any:
        """Enqueue the reading of all tensors; return the event that marks its end.

        `send` must be called for the rest.
        """
        gathered = _new_event(self._device)
        with self._sending:  # otherwise data that is still being sent would be overwritten
            self._begin(sources, self._legs[is_overlapped], gathered)
        return gathered

    def send(self) -> Any:
        """Send the gathered data over the bus; return the event when all is in the arena.

        Any thread may call it; it is slow.
        """
        with self._sending:
            crates, self._unsent = self._unsent, []
            with _kit(self._device).stream(self._side):
                for crate in crates:
                    crate.send(lambda: _record(self._device, self._side).synchronize())
            self._copied = _record(self._device, self._side)
            return self._copied

    def close(self) -> None:
        self.send().synchronize()

    def _begin(self, sources: Sequence[Source], legs: tuple[_Leg, _Leg], gathered: Any) -> None:
        kit = _kit(self._device)
        current = kit.current_stream(self._device)
        if self._copied is not None:
            current.wait_event(self._copied)  # the buffer is free again
        now, later = legs
        if self.way == "whole":
            for crate in now.crates:
                crate.collect(sources)
            gathered.record(current)
            self._side.wait_event(gathered)
            self._unsent = now.crates
        else:
            _carry(now, sources, lambda: None)
            self._side.wait_stream(current)
            with kit.stream(self._side):
                _carry(later, sources, lambda: gathered.record(self._side))
            self._copied = _record(self._device, self._side)

    def _allocate(self) -> Tensor:
        """Allocate the buffer; fall back to the next best way when there is no memory for it."""
        while True:
            batches, _ = plan_batches(self._spans, self._most_bytes)
            size = max((batch.size_bytes for batch in batches), default=0)
            try:
                buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                self.way = _NEXT_BEST[self.way]
                continue
            if accelerator.is_on_gpu(buffer):
                buffer.record_stream(self._side)  # type: ignore[arg-type]
            return buffer

    def _plan(self, is_overlapped: bool, sources: Sequence[Source]) -> None:
        waits = is_overlapped and self.way != "whole"
        later = [span for span in self._spans if waits and sources[span.number].is_deferred]
        now = [span for span in self._spans if not (waits and sources[span.number].is_deferred)]
        self._legs[is_overlapped] = self._leg(now, sources), self._leg(later, sources)

    def _leg(self, spans: Sequence[Span], sources: Sequence[Source]) -> _Leg:
        batches, alone = plan_batches(spans, self._most_bytes)
        crates = [Crate(batch, sources, self._buffer, self._arena) for batch in batches]
        start = {span.number: span.start for span in spans}
        return _Leg([(n, _view(self._arena, start[n], sources[n].tensor)) for n in alone], crates)


def _carry(leg: _Leg, sources: Sequence[Source], when_read: Callable[[], None]) -> None:
    if leg.alone:
        tensors = [as_stored(sources[number].tensor) for number, _ in leg.alone]
        torch._foreach_copy_([view for _, view in leg.alone], tensors, non_blocking=True)
    for crate in leg.crates[:-1]:
        crate.collect(sources)
        crate.send()
    for crate in leg.crates[-1:]:
        crate.collect(sources)
    when_read()  # only the last batch's transfer over the bus is left, and that reads the buffer
    for crate in leg.crates[-1:]:
        crate.send()


def _view(arena: Tensor, start: int, tensor: Tensor) -> Tensor:
    stored = as_stored(tensor)
    return arena[start : start + stored.numel() * stored.element_size()].view(stored.dtype).view(stored.shape)


def _kit(device: torch.device) -> Any:
    return accelerator.backend() if accelerator.is_gpu(device) else torch.cpu


def _new_event(device: torch.device) -> Any:
    """An event whose waiters sleep instead of spinning."""
    return accelerator.new_event(is_blocking=True) if accelerator.is_gpu(device) else torch.cpu.Event()


def _record(device: torch.device, stream: Any) -> Any:
    event = _new_event(device)
    event.record(stream)
    return event


def drain(devices: Collection[torch.device]) -> None:
    """Wait until all work enqueued so far is done, on every stream of these devices and of the current one.

    This matters for host tensors too: a copy into pinned memory may still be in progress.
    """
    if not accelerator.is_open():
        return
    current = accelerator.current_device()
    for device in {current, *(device for device in devices if accelerator.is_gpu(device))}:
        accelerator.synchronize(device)


def let_wait(device: torch.device, event: Any) -> None:
    """Make all work enqueued on that device from now on start after the event."""
    _kit(device).current_stream(device).wait_event(event)

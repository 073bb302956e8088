"""Host memory in which a device's numbers land: a loop that reports one enqueues one small copy, and no kernel.

A kernel launch costs 10 us of the loop's time on an H200, a copy of four bytes into pinned memory 7. The copy needs
no kernel where the place is of the number's own kind: hence a lane for each kind, and for each stream, because only
that stream knows when the copies on it are done. Places come in pages; a page is used again when all of it was read,
which is after its copies were done: nothing is overwritten, and nobody waits, for where no page is free one is made.
Owns the pages and which places are free. Does not own the numbers' names nor their order (scalars).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

PAGE = 128  # places; making one takes about 0.1 ms
_KEPT = 64  # pages: what a long stall needed is not held for ever
# Kinds that the host reads as they are. Any other is cast by the copy: a kernel more.
_PLAIN = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip


class Place:
    """Where one number lands."""

    __slots__ = ("at", "page", "slot")

    def __init__(self, page: Page, at: int, slot: torch.Tensor) -> None:
        self.page, self.at, self.slot = page, at, slot


class Page:
    """A row of places. Taken from front to back by the loop's thread, read by the reporting one."""

    __slots__ = ("buffer", "lane", "num_read", "places")

    def __init__(self, lane: Lane, buffer: torch.Tensor) -> None:
        self.lane, self.buffer = lane, buffer
        # Made once: a slice of its own for each number would cost a microsecond each time.
        self.places = [Place(self, at, slot) for at, slot in enumerate(buffer.unbind())]
        self.num_read = 0


class Lane:
    """The places for numbers of one kind that come from one stream."""

    def __init__(self, stream: Any, make_buffer: Callable[[], torch.Tensor]) -> None:
        self.stream = stream
        self._make_buffer = make_buffer
        self._free: deque[Page] = deque(maxlen=_KEPT)
        self._page = Page(self, make_buffer())
        self._num_taken = 0

    def land(self, value: torch.Tensor) -> Place:
        """The number is in the place when the stream has got that far."""
        if value.requires_grad:
            value = value.detach()
        if value.dim():
            value = value.reshape(())
        if self._num_taken == PAGE:
            self._page = self._free.popleft() if self._free else Page(self, self._make_buffer())
            self._num_taken = 0
        place = self._page.places[self._num_taken]
        place.slot.copy_(value, True)  # by position: the word non_blocking costs 0.4 us
        self._num_taken += 1
        return place

    def take_back(self, page: Page) -> None:
        """Everything on the page was read."""
        page.num_read = 0
        self._free.append(page)


class CudaLanes:
    """The lanes in use. A stream that never reported has none."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int, torch.dtype], Lane] = {}
        # The stream as an object takes 2 us to ask for, its number 0.1.
        self._stream_number: Callable[[int], int] = getattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
        )

    def land(self, value: torch.Tensor) -> Place:
        device = value.get_device()
        key = (device, self._stream_number(device), value.dtype)
        lane = self._lanes.get(key)
        if lane is None:
            kind = value.dtype if value.dtype in _PLAIN else torch.float64
            lane = Lane(torch.cuda.current_stream(device), lambda: make_buffer(kind, is_pinned=True))
            self._lanes[key] = lane
        return lane.land(value)


def make_buffer(kind: torch.dtype, *, is_pinned: bool) -> torch.Tensor:
    # A tensor of inference mode could not be written to outside of it; a default device may be set to the GPU.
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(PAGE, dtype=kind, device="cpu", pin_memory=is_pinned)


def mark_arrival(places: Iterable[Place]) -> list[Any]:
    """Events that are over when all that lands in these places is there. In the thread that let it land."""
    return [stream.record_event() for stream in {place.page.lane.stream for place in places}]


def read_places(places: list[Place]) -> list[float]:
    """The numbers, once their events are over; each is asked for once. Pages that were read to the end are free."""
    numbers: dict[Page, list[float]] = {}
    for place in places:
        if place.page not in numbers:
            # float64 holds every float, bfloat16 and count exactly.
            numbers[place.page] = place.page.buffer.to(torch.float64).tolist()
    found = [numbers[place.page][place.at] for place in places]
    for place in places:
        place.page.num_read += 1
    for page in numbers:
        if page.num_read == PAGE:
            page.lane.take_back(page)
    return found

"""Pinned host memory that receives logged GPU values: logging one enqueues one small copy and no kernel.

A kernel launch costs 10 us of the loop's time on an H200, a copy of four bytes into pinned memory 7. The copy needs
no kernel where the slot has the value's own dtype. So there is a lane for each dtype, and for each stream, because
only that stream knows when its copies are done. Slots come in pages. A page is reused when all of it was read, which
is after its copies were done: nothing is overwritten. Nothing waits either: where no page is free, one is made.
Owns the pages and which slots are free. Does not own the values' names nor their order (scalars).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from jackline import accelerator

PAGE = 128  # slots; making a page takes about 0.1 ms
_KEPT = 64  # pages: those that a long stall needed are not kept for ever
# Dtypes that the host reads directly. Any other is cast by the copy, which costs one more kernel.
_PLAIN = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip


class Place:
    """The slot that receives one value."""

    __slots__ = ("at", "page", "slot")

    def __init__(self, page: Page, at: int, slot: torch.Tensor) -> None:
        self.page, self.at, self.slot = page, at, slot


class Page:
    """A row of slots. The loop's thread takes them from front to back; the reporting thread reads them."""

    __slots__ = ("buffer", "lane", "num_read", "places")

    def __init__(self, lane: Lane, buffer: torch.Tensor) -> None:
        self.lane, self.buffer = lane, buffer
        # Made once: slicing for each value would cost a microsecond each time.
        self.places = [Place(self, at, slot) for at, slot in enumerate(buffer.unbind())]
        self.num_read = 0


class Lane:
    """The slots for values of one dtype from one stream."""

    def __init__(self, stream: Any, make_buffer: Callable[[], torch.Tensor]) -> None:
        self.stream = stream
        self._make_buffer = make_buffer
        self._free: deque[Page] = deque(maxlen=_KEPT)
        self._page = Page(self, make_buffer())
        self._num_taken = 0

    def land(self, value: torch.Tensor) -> Place:
        """Enqueue the copy. The slot is valid once the stream has executed it."""
        if value.requires_grad:
            value = value.detach()
        if value.dim():
            value = value.reshape(())
        if self._num_taken == PAGE:
            self._page = self._free.popleft() if self._free else Page(self, self._make_buffer())
            self._num_taken = 0
        place = self._page.places[self._num_taken]
        place.slot.copy_(value, True)  # by position: the keyword non_blocking costs 0.4 us
        self._num_taken += 1
        return place

    def take_back(self, page: Page) -> None:
        """Free the page: everything on it was read."""
        page.num_read = 0
        self._free.append(page)


class CudaLanes:
    """The lanes in use. A stream that never logged a value has none."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int, torch.dtype], Lane] = {}
        # Getting the stream as an object takes 2 us, getting its ID 0.1.
        self._stream_number: Callable[[int], int] = getattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: accelerator.current_stream(device).cuda_stream
        )

    def land(self, value: torch.Tensor) -> Place:
        device = value.get_device()
        key = (device, self._stream_number(device), value.dtype)
        lane = self._lanes.get(key)
        if lane is None:
            dtype = value.dtype if value.dtype in _PLAIN else torch.float64
            lane = Lane(accelerator.current_stream(device), lambda: make_buffer(dtype, is_pinned=True))
            self._lanes[key] = lane
        return lane.land(value)


def make_buffer(dtype: torch.dtype, *, is_pinned: bool) -> torch.Tensor:
    # A tensor made in inference mode could not be written to outside of it; the default device may be set to the GPU.
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(PAGE, dtype=dtype, device="cpu", pin_memory=is_pinned)


def mark_arrival(places: Iterable[Place]) -> list[Any]:
    """Events that complete when all values for these slots have arrived.

    Call it in the thread that enqueued the copies.
    """
    return [stream.record_event() for stream in {place.page.lane.stream for place in places}]


def read_places(places: list[Place]) -> list[float]:
    """The values, once their events have completed; each is read once.

    Pages that were read to the end become free.
    """
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

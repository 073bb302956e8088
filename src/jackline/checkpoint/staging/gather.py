"""Gathering a GPU's tensors in one buffer on the GPU, so that the bus carries a few large copies and not hundreds.

A training state is hundreds of tensors, and each copy to the host costs the loop's own thread about 15 us. Gathering
them in one buffer takes a handful of fused kernels at the speed of GPU memory. The buffer has the arena's order, so
one copy then suffices for every contiguous part of the arena. With a buffer for the whole state the loop may change
its tensors as soon as the gathering is over, after about a millisecond, and need not wait for the bus.
Owns the batches and their copies. Does not own streams and events (stage.py): it works on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jackline import accelerator
from jackline.checkpoint.state.capture import Source
from jackline.checkpoint.state.dtypes import as_stored

Way = Literal["whole", "bounce", "none"]
_ALIGNMENT = 512
LEG_BYTES = 16 << 20  # of one transfer over the bus: 0.3 ms
# Dtypes that torch copies in one fused kernel; others are copied one by one.
_FUSED = frozenset(
    (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
)


@dataclass(frozen=True)
class GpuCopies:
    """How a GPU's tensors are copied to the host.

    'whole': through a copy of all of them on the GPU; 'bounce': small ones in batches; 'none': each separately.
    'auto' takes the first of these for which there is plenty of memory.
    """

    way: Way | Literal["auto"] = "auto"
    batch_bytes: int = 128 << 20
    free_bytes: Callable[[torch.device], int] = accelerator.free_bytes
    is_limited: Callable[[torch.device], bool] = accelerator.is_limited
    kinds: tuple[str, ...] = ("cuda",)  # device types; tests gather host tensors with the same code


def choose_way(copies: GpuCopies, state_bytes: int, free_bytes: int, *, is_limited: bool = False) -> Way:
    """Copy the state on the GPU only where three copies would fit: training may still need the rest. A training with
    a limit was planned to fill it, and nothing is left for copies."""
    if copies.way != "auto":
        return copies.way
    if is_limited:
        return "none"
    if free_bytes > 3 * state_bytes:
        return "whole"
    return "bounce" if free_bytes > 4 * copies.batch_bytes else "none"


def is_short(copies: GpuCopies, state_bytes: int, free_bytes: int) -> bool:
    """Whether GPU memory has become so short that a copy made earlier must be freed."""
    return copies.way == "auto" and free_bytes < state_bytes


@dataclass(frozen=True)
class Span:
    """One tensor: its index in the state, and its bytes in the arena."""

    number: int
    start: int
    size_bytes: int


@dataclass(frozen=True)
class Stretch:
    """Bytes that are contiguous both in the arena and in the buffer."""

    start: int
    in_buffer: int
    size_bytes: int


@dataclass(frozen=True)
class Batch:
    """What the buffer holds at one time. `places`: the index of a tensor and its offset in the buffer."""

    places: tuple[tuple[int, int], ...]
    stretches: tuple[Stretch, ...]

    @property
    def size_bytes(self) -> int:
        return max((stretch.in_buffer + stretch.size_bytes for stretch in self.stretches), default=0)


def plan_batches(spans: Sequence[Span], most_bytes: int | None) -> tuple[list[Batch], list[int]]:
    """Batches of at most that size, in the arena's order, and the indices of tensors too large for a batch.

    The bytes between two stretches must not be overwritten: they are headers, and tensors that are copied another
    way.
    """
    batches: list[Batch] = []
    alone: list[int] = []
    places: list[tuple[int, int]] = []
    stretches: list[Stretch] = []
    for span in sorted((span for span in spans if span.size_bytes), key=lambda span: span.start):
        if most_bytes is not None and span.size_bytes > most_bytes - _ALIGNMENT:
            alone.append(span.number)
            continue
        at = _next_place(stretches, span)
        if most_bytes is not None and places and at + span.size_bytes > most_bytes:
            batches.append(Batch(tuple(places), tuple(stretches)))
            places, stretches = [], []
            at = _next_place(stretches, span)
        places.append((span.number, at))
        last = stretches[-1] if stretches else None
        if last is not None and last.start + last.size_bytes == span.start:
            stretches[-1] = Stretch(last.start, last.in_buffer, last.size_bytes + span.size_bytes)
        else:
            stretches.append(Stretch(span.start, at, span.size_bytes))
    return batches + ([Batch(tuple(places), tuple(stretches))] if places else []), alone


def _next_place(stretches: Sequence[Stretch], span: Span) -> int:
    """The span's offset in the buffer: right behind the last stretch if the span continues it.

    Otherwise its offset has the same remainder modulo the alignment as in the arena, because a kernel reads and
    writes 16 bytes at a time where it can.
    """
    if not stretches:
        return span.start % _ALIGNMENT
    last = stretches[-1]
    end = last.in_buffer + last.size_bytes
    if last.start + last.size_bytes == span.start:
        return end
    return -(-end // _ALIGNMENT) * _ALIGNMENT + span.start % _ALIGNMENT


class Crate:
    """One batch, prepared once: which views of the buffer and of the arena belong to which tensor.

    Views depend only on dtypes and shapes, so they stay right when tensors move. The tensors are looked up for each
    save.
    """

    def __init__(self, batch: Batch, sources: Sequence[Source], buffer: Tensor, arena: Tensor) -> None:
        groups: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        self._single: list[tuple[int, Tensor]] = []
        for number, start in batch.places:
            live = sources[number].tensor
            tensor = as_stored(live)
            view = buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype)
            view = view.view(tensor.shape)
            # One tensor with different strides would make torch copy the whole list one by one.
            if live.dtype in _FUSED and view.stride() == live.stride() and not live.is_neg():
                numbers, views = groups.setdefault(live.dtype, ([], []))
                numbers.append(number)
                views.append(view)
            else:
                self._single.append((number, view))
        self._fused = list(groups.values())
        self._ways_out = [
            (arena[one.start + begin : one.start + end], buffer[one.in_buffer + begin : one.in_buffer + end])
            for one in batch.stretches
            for begin, end in _legs(one.size_bytes)
        ]

    def collect(self, sources: Sequence[Source]) -> None:
        """Copy the tensors' current values into the buffer. After this they may change."""
        for numbers, views in self._fused:
            torch._foreach_copy_(views, [sources[number].tensor for number in numbers], non_blocking=True)
        for number, view in self._single:
            view.copy_(as_stored(sources[number].tensor), non_blocking=True)

    def send(self, before_each: Callable[[], None] = lambda: None) -> None:
        """Copy from the buffer to the arena, at most LEG_BYTES at a time."""
        for there, here in self._ways_out:
            before_each()
            there.copy_(here, non_blocking=True)


def _legs(size_bytes: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + LEG_BYTES, size_bytes)) for begin in range(0, size_bytes, LEG_BYTES)]

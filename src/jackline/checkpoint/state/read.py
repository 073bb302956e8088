"""Reads tensor files directly into the tensors they belong to, and verifies them on the way.

Several threads read every byte of a file once, into its final place where that is plain host memory, else through a
buffer. Each small read is hashed while it is still in the processor's cache, so loading with verification costs
little more than loading. Owns what goes where. Does not own how bytes come from the disk (source.py) or what the
tensors mean (restore.py).
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from jackline import accelerator
from jackline.checkpoint.format.hashing import CHUNK_BYTES, chunk_offsets, new_hash
from jackline.checkpoint.format.header import Header, StoredTensor
from jackline.checkpoint.format.manifest import FileEntry
from jackline.checkpoint.format.parallel import run_in_threads
from jackline.checkpoint.format.verify import wrong_chunk
from jackline.checkpoint.staging.stage import is_plain_memory
from jackline.checkpoint.state.dtypes import as_stored, torch_dtype
from jackline.checkpoint.state.source import DISK_THREADS, Source

_FEW_PIECES = 16  # of a chunk: more of them are read together
READ_THREADS = min(4, len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Target:
    """One stored tensor (`name` in the file) and where its values belong. `region`: only this box of it."""

    name: str
    tensor: Tensor
    region: tuple[slice, ...] | None = None


@dataclass(frozen=True)
class _Span:
    """Bytes [start, end) of the file and their destination: host memory, or a tensor on a device as flat bytes."""

    start: int
    end: int
    address: int
    device: Tensor | None = None


def read_tensors(
    path: Path,
    entry: FileEntry,
    header: Header,
    targets: Sequence[Target],
    algorithm: str,
    threads: int = READ_THREADS,
) -> None:
    """Fill all targets from one file. Raises Damage at the first wrong byte; some targets are changed by then."""
    places = {tensor.name: tensor for tensor in header.tensors}
    spans: list[_Span] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for target in targets:
        place = places[target.name]
        memory = as_stored(target.tensor)
        rows = _rows(target.region, place)
        start, end = header.data_offset + place.begin, header.data_offset + place.end
        if end == start:
            continue
        if rows is None:  # a box that is not one piece of the file: read all, keep the box
            buffer = torch.empty(place.shape, dtype=torch_dtype(place.dtype))
            copies.append((memory, buffer[target.region or ...]))
            spans.append(_Span(start, end, buffer.data_ptr()))
            continue
        start, end = start + rows[0], start + rows[1]
        if accelerator.is_on_gpu(memory) and memory.is_contiguous():
            spans.append(_Span(start, end, 0, memory.reshape(-1).view(torch.uint8)))
            continue
        if not is_plain_memory(memory):
            buffer = torch.empty(memory.shape, dtype=torch_dtype(place.dtype))
            copies.append((memory, buffer))
            memory = buffer
        spans.append(_Span(start, end, memory.data_ptr()))
    spans.sort(key=lambda span: span.start)
    _read_spans(path, entry, spans, algorithm, threads)
    with torch.no_grad():
        for memory, buffer in copies:
            memory.copy_(buffer)


def _rows(region: tuple[slice, ...] | None, place: StoredTensor) -> tuple[int, int] | None:
    """The bytes of a box, counted from the tensor's first; None when they are not in one piece."""
    size = place.end - place.begin
    if region is None or not region:
        return 0, size
    whole = zip(region[1:], place.shape[1:], strict=False)
    if any((one.start, one.stop) != (0, length) for one, length in whole):
        return None
    row = size // max(1, place.shape[0])
    return region[0].start * row, region[0].stop * row


def _read_spans(path: Path, entry: FileEntry, spans: list[_Span], algorithm: str, threads: int) -> None:
    starts = [span.start for span in spans]
    has_device = any(span.device is not None for span in spans)
    own = threading.local()
    source = Source(path, entry.name)
    try:

        def read(start: int) -> None:
            if not hasattr(own, "spare"):
                own.spare = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=has_device)
            end = min(start + CHUNK_BYTES, entry.size_bytes)
            window = _Window(start, end, own.spare)
            window.fill(spans, starts)
            running = new_hash(algorithm)
            is_on_disk = source.is_on_disk(start, end)
            if not is_on_disk and len(window.pieces) <= _FEW_PIECES:
                source.read_hashed(window.pieces, start, running.update)
            else:
                for offset, pieces in _sips(window.pieces, start, source.sip_bytes(is_on_disk)):
                    for piece in source.read(pieces, offset, is_on_disk=is_on_disk):
                        running.update(piece)
            if running.hexdigest() != entry.chunks[start // CHUNK_BYTES]:
                raise wrong_chunk(entry.name, start, end - start)
            window.send()

        starts_of_chunks = chunk_offsets(entry.size_bytes)
        middle = starts_of_chunks[len(starts_of_chunks) // 2]
        if source.is_on_disk(middle, min(middle + CHUNK_BYTES, entry.size_bytes)):
            threads = max(threads, DISK_THREADS)
        run_in_threads(read, list(starts_of_chunks), threads)
    finally:
        source.close()


class _Window:
    """One chunk of the file: the memory its bytes go to, in order.

    `spare` takes bytes whose target is not host memory.
    """

    def __init__(self, start: int, end: int, spare: Tensor) -> None:
        self.start, self.end = start, end
        self.pieces: list[memoryview] = []
        self._spare = spare
        self._uploads: list[tuple[Tensor, Tensor]] = []

    def fill(self, spans: list[_Span], starts: list[int]) -> None:
        position = self.start
        index = max(0, bisect.bisect_right(starts, position) - 1)
        while position < self.end:
            while index < len(spans) and spans[index].end <= position:
                index += 1
            span = spans[index] if index < len(spans) else None
            if span is None or span.start >= self.end:
                self._add_spare(position, self.end)
                break
            if span.start > position:
                self._add_spare(position, span.start)
                position = span.start
            stop = min(span.end, self.end)
            if span.device is None:
                self.pieces.append(_memory(span.address + position - span.start, stop - position))
            else:
                part = self._add_spare(position, stop)
                self._uploads.append((span.device[position - span.start : stop - span.start], part))
            position = stop

    def send(self) -> None:
        """Copy to the devices. Waits, because the spare memory is reused for the next chunk immediately."""
        for place, part in self._uploads:
            place.copy_(part, non_blocking=True)
        for device in {place.device for place, _ in self._uploads}:
            accelerator.current_stream(device).synchronize()

    def _add_spare(self, start: int, end: int) -> Tensor:
        part = self._spare[start - self.start : end - self.start]
        self.pieces.append(_memory(part.data_ptr(), end - start))
        return part


def _sips(pieces: list[memoryview], offset: int, sip_bytes: int) -> Iterator[tuple[int, list[memoryview]]]:
    """The pieces in groups of at most `sip_bytes`, and where in the file each group begins."""
    group: list[memoryview] = []
    size = 0
    for piece in pieces:
        rest = piece
        while len(rest):
            part, rest = rest[: sip_bytes - size], rest[sip_bytes - size :]
            group.append(part)
            size += len(part)
            if size == sip_bytes:
                yield offset, group
                offset, group, size = offset + size, [], 0
    if group:
        yield offset, group


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")

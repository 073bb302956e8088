"""Tensor files straight into the tensors they belong to, proved on the way.

Every byte of a file is read once, by several threads, into its final place where that is plain host memory, else
through a buffer; each half MiB is hashed while it is still in the processor's cache. So loading with proof costs
little more than loading. Owns the reading. Does not know what the tensors mean (restore.py).
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

from jackline.checkpoint.dtypes import as_stored, torch_dtype
from jackline.checkpoint.format import Damage, FileEntry
from jackline.checkpoint.hashing import CHUNK_BYTES, chunk_offsets, new_hash
from jackline.checkpoint.header import Header
from jackline.checkpoint.parallel import run_in_threads
from jackline.checkpoint.stage import is_plain_memory
from jackline.checkpoint.verify import open_to_read, wrong_chunk

READ_THREADS = min(4, len(os.sched_getaffinity(0)))
# What stays in a core's own cache until it is hashed. With a map of the file instead of reads it was no faster (6-7
# GB/s on two cores either way, against 9 to 10 for a copy without a proof), and a disk that fails under a map kills.
_SIP_BYTES = 512 << 10
_MAX_PIECES = 512  # the kernel takes 1024 in one call


@dataclass(frozen=True)
class Target:
    """One stored tensor (`name` in the file) and where its values belong."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class _Span:
    """Bytes [start, end) of the file and where they go: host memory, or a tensor on a device as flat bytes."""

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
    """Fills all targets from one file. Damage at the first wrong byte; some targets are changed by then."""
    places = {tensor.name: tensor for tensor in header.tensors}
    spans: list[_Span] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for target in targets:
        place = places[target.name]
        start, end = header.data_offset + place.begin, header.data_offset + place.end
        memory = as_stored(target.tensor)
        if end == start:
            continue
        if memory.is_cuda and memory.is_contiguous():
            spans.append(_Span(start, end, 0, memory.reshape(-1).view(torch.uint8)))
            continue
        if not is_plain_memory(memory):
            buffer = torch.empty(place.shape, dtype=torch_dtype(place.dtype))
            copies.append((memory, buffer))
            memory = buffer
        spans.append(_Span(start, end, memory.data_ptr()))
    spans.sort(key=lambda span: span.start)
    _read_spans(path, entry, spans, algorithm, threads)
    with torch.no_grad():
        for memory, buffer in copies:
            memory.copy_(buffer)


def _read_spans(path: Path, entry: FileEntry, spans: list[_Span], algorithm: str, threads: int) -> None:
    starts = [span.start for span in spans]
    has_device = any(span.device is not None for span in spans)
    own = threading.local()
    fd = open_to_read(path)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

        def read(start: int) -> None:
            if not hasattr(own, "spare"):
                own.spare = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=has_device)
            end = min(start + CHUNK_BYTES, entry.size_bytes)
            window = _Window(start, end, own.spare)
            window.fill(spans, starts)
            running = new_hash(algorithm)
            for offset, pieces in _sips(window.pieces, start):
                _read_pieces(fd, pieces, offset, entry.name)
                for piece in pieces:
                    running.update(piece)
            if running.hexdigest() != entry.chunks[start // CHUNK_BYTES]:
                raise wrong_chunk(entry.name, start, end - start)
            window.send()

        run_in_threads(read, list(chunk_offsets(entry.size_bytes)), threads)
    finally:
        os.close(fd)


class _Window:
    """One chunk of the file: the memory its bytes go to, in order. `spare` takes what has no place in host memory."""

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
        """To the devices. Waits, because the spare memory is used for the next chunk at once."""
        for place, part in self._uploads:
            place.copy_(part, non_blocking=True)
        for device in {place.device for place, _ in self._uploads}:
            torch.cuda.current_stream(device).synchronize()

    def _add_spare(self, start: int, end: int) -> Tensor:
        part = self._spare[start - self.start : end - self.start]
        self.pieces.append(_memory(part.data_ptr(), end - start))
        return part


def _sips(pieces: list[memoryview], offset: int) -> Iterator[tuple[int, list[memoryview]]]:
    """The pieces in groups of at most half a MiB, and where in the file each group begins."""
    group: list[memoryview] = []
    size = 0
    for piece in pieces:
        rest = piece
        while len(rest):
            part, rest = rest[: _SIP_BYTES - size], rest[_SIP_BYTES - size :]
            group.append(part)
            size += len(part)
            if size == _SIP_BYTES:
                yield offset, group
                offset, group, size = offset + size, [], 0
    if group:
        yield offset, group


def _read_pieces(fd: int, pieces: list[memoryview], offset: int, name: str) -> None:
    """Fills the pieces from the file, one after another."""
    waiting = list(pieces)
    try:
        while waiting:
            got = os.preadv(fd, waiting[:_MAX_PIECES], offset)
            if got == 0:
                raise Damage(f"{name} ends at {offset} bytes")
            offset += got
            while waiting and got >= len(waiting[0]):
                got -= len(waiting.pop(0))
            if got:
                waiting[0] = waiting[0][got:]
    except OSError as problem:
        raise Damage(f"{name} cannot be read at {offset} bytes: {problem.strerror}") from None


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")

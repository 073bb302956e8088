"""gzip members and zstd frames of a file, decompressed in pieces of bounded size.

Owns: where each frame begins (resuming re-reads one frame, not the file), and that no piece is larger than a MiB
however well the data compresses: the decompressors' own stream objects turn 32 KiB of input into a GiB of output. For
zstd that means parsing the block headers (RFC 8878, 3.1.1), because a block is at most 128 KiB. Does not own which
bytes are asked for (decompress.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from jackline.data.sources.bytefile import ByteFile

_READ_BYTES = 1 << 18
_MAX_PIECE_BYTES = 1 << 20
_MAX_ZSTD_WINDOW_BYTES = 1 << 27  # a frame may ask for gigabytes; more than this would break the memory limit
_ZSTD_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50


class DamagedBytes(Exception):
    """The file's own bytes are damaged from here on; `str()` is the reason under which it is counted and shown."""


class Piece(NamedTuple):
    """Decompressed bytes, the start of their frame in the file, and the offset up to which the file was read."""

    data: bytes
    frame_start: int
    file_offset: int


def gzip_pieces(file: ByteFile, offset: int) -> Iterator[Piece]:
    """Every member from the one that begins at `offset`."""
    decoder, start = None, offset
    while data := file.read_at(offset, _READ_BYTES, at_least=1):
        while data:
            if decoder is None:
                if not data.strip(b"\0"):
                    offset += len(data)  # tapes and some tools pad gzip files with zeros
                    break
                decoder, start = zlib.decompressobj(wbits=31), offset
            try:
                out = decoder.decompress(data, _MAX_PIECE_BYTES)
            except zlib.error as error:
                raise DamagedBytes("damaged gz file") from error
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
            offset += len(data) - len(rest)
            if decoder.eof:
                decoder = None
            yield Piece(out, start, offset)
            data = rest
    if decoder is not None:
        raise DamagedBytes("truncated gz file")


def zstd_pieces(file: ByteFile, offset: int) -> Iterator[Piece]:
    """Every frame from the one that begins at `offset`, without skippable frames."""
    import zstandard  # imported only for sources that need it

    reader = _Exact(file, offset)
    while not reader.is_at_end():
        start = reader.offset
        magic = int.from_bytes(head := reader.take(4), "little")
        if magic & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
            reader.pass_over(int.from_bytes(reader.take(4), "little"))
            continue
        if magic != _ZSTD_MAGIC:
            raise DamagedBytes("damaged zst file")
        decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES).decompressobj()
        try:
            for part in _zstd_parts(reader, head):
                yield Piece(decoder.decompress(part), start, reader.offset)
        except zstandard.ZstdError as error:
            raise DamagedBytes("damaged zst file") from error


def _zstd_parts(reader: _Exact, magic: bytes) -> Iterator[bytes]:
    """One frame as header, blocks and checksum."""
    descriptor = reader.take(1)[0]
    is_single = bool(descriptor & 0x20)
    size_of_size = (int(is_single), 2, 4, 8)[descriptor >> 6]
    num_more = (0 if is_single else 1) + (0, 1, 2, 4)[descriptor & 3] + size_of_size
    yield magic + bytes([descriptor]) + reader.take(num_more)
    is_last = False
    while not is_last:
        header = reader.take(3)
        word = int.from_bytes(header, "little")
        is_last, kind, size = bool(word & 1), word >> 1 & 3, word >> 3
        if kind == 3:
            raise DamagedBytes("damaged zst file")
        yield header + reader.take(1 if kind == 1 else size)
    if descriptor & 4:
        yield reader.take(4)


class _Exact:
    """Returns exactly as many bytes as asked for; otherwise the file is truncated, which is damage."""

    def __init__(self, file: ByteFile, offset: int) -> None:
        self._file = file
        self._buffer = b""
        self._used = 0
        self.offset = offset

    def is_at_end(self) -> bool:
        return self._used == len(self._buffer) and not self._fill(1)

    def take(self, count: int) -> bytes:
        if len(self._buffer) - self._used < count and not self._fill(count):
            raise DamagedBytes("truncated zst file")
        out = self._buffer[self._used : self._used + count]
        self._used += count
        self.offset += count
        return out

    def pass_over(self, count: int) -> None:
        self.offset += count
        self._buffer, self._used = b"", 0

    def _fill(self, count: int) -> bool:
        kept = self._buffer[self._used :]
        # Decompress what has arrived at once: a source that sends a document a second must not wait for a MiB.
        at_least = count - len(kept)
        data: Any = self._file.read_at(self.offset + len(kept), max(_READ_BYTES, count), at_least=at_least)
        self._buffer, self._used = kept + data, 0
        return len(self._buffer) >= count

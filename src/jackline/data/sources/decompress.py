"""A file's bytes as one sequential, decompressed stream, with places from which reading can resume.

Owns the place of any byte as (start of its frame in the file, offset inside the decompressed frame). Bytes before
damage are returned; the next read raises the damage, and the one after it continues with the next frame. Does not own
records or the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from jackline.data.sources.bytefile import ByteFile
from jackline.data.sources.damage import DamagedBytes
from jackline.data.sources.frames import Gap, Piece, gzip_pieces, zstd_pieces

At = tuple[int, ...]
START: At = (0, 0)
# Records reach at most this far back from what was read last (records.MAX_RECORD_BYTES and a block).
_KEEP_PLACES_BYTES = 96 << 20
_SOME_BYTES = 1 << 18


class Stream(Protocol):
    """Sequential bytes of one file."""

    def read(self, count: int) -> bytes:
        """`count` bytes; fewer only at the end, or before damage, which the next call raises. Reading continues after
        it: `place(0)` is then the start of the next frame."""

    def read_some(self) -> bytes:
        """What has arrived, at least one byte; empty only at the end."""

    def place(self, back: int) -> At:
        """The place of the byte that was read `back` bytes ago."""

    @property
    def file_offset(self) -> int:
        """How many bytes of the file itself were read, for progress."""


def open_stream(file: ByteFile, compression: str, at: At) -> Stream:
    """A stream over `file` that begins at `at`."""
    if compression == "":
        return PlainStream(file, at[0])
    pieces = gzip_pieces(file, at[0]) if compression == "gz" else zstd_pieces(file, at[0])
    return FrameStream(pieces, at)


class PlainStream:
    """The file as it is; a place is its byte offset."""

    def __init__(self, file: ByteFile, offset: int) -> None:
        self._file = file
        self.file_offset = offset

    def read(self, count: int) -> bytes:
        data = self._file.read_at(self.file_offset, count)
        self.file_offset += len(data)
        return data

    def read_some(self) -> bytes:
        data = self._file.read_at(self.file_offset, _SOME_BYTES, at_least=1)
        self.file_offset += len(data)
        return data

    def place(self, back: int) -> At:
        return (self.file_offset - back, 0)


class FrameStream:
    """Frames, one after the other."""

    def __init__(self, pieces: Iterator[Piece | Gap], at: At) -> None:
        self._pieces = pieces
        self.file_offset = at[0]
        self._ready = bytearray()
        self._num_out = 0  # decompressed bytes returned since the stream was opened
        self._frames: deque[tuple[int, int]] = deque([(0, at[0])])  # (first decompressed byte, start in the file)
        self._gap: Gap | None = None
        left = at[1]
        while left > 0:
            part = self.read(min(left, 1 << 20))
            if not part:
                raise DamagedBytes("compressed file is shorter than it was")
            left -= len(part)

    def read(self, count: int) -> bytes:
        while len(self._ready) < count and self._take_piece():
            pass
        if count and not self._ready and self._gap is not None:
            gap, self._gap = self._gap, None
            self._frames.append((self._num_out, gap.resumes_at))
            self.file_offset = gap.resumes_at
            raise gap.damage
        out = bytes(self._ready[:count])
        del self._ready[:count]
        self._num_out += len(out)
        while len(self._frames) > 1 and self._frames[1][0] + _KEEP_PLACES_BYTES < self._num_out:
            self._frames.popleft()
        return out

    def read_some(self) -> bytes:
        while not self._ready and self._take_piece():
            pass
        return self.read(max(1, len(self._ready)))

    def _take_piece(self) -> bool:
        """Add one more piece to the ready bytes; False at the end, and at damage, which is kept for the next read."""
        piece = next(self._pieces, None) if self._gap is None else None
        if isinstance(piece, Gap):
            self._gap = piece
            return False
        if piece is None:
            return False
        if piece.frame_start != self._frames[-1][1]:
            self._frames.append((self._num_out + len(self._ready), piece.frame_start))
        self._ready += piece.data
        self.file_offset = piece.file_offset
        return True

    def place(self, back: int) -> At:
        byte = self._num_out - back
        for first, start in reversed(self._frames):
            if first <= byte:
                return (start, byte - first)
        raise AssertionError(f"the place {back} bytes back is no longer known")

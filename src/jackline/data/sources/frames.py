"""gzip members and zstd frames of a file, decompressed in pieces of bounded size.

Owns: where each frame begins (resuming re-reads one frame, not the file), where reading continues after damage (the
next frame or member), and that no piece is larger than a MiB however well the data compresses: the decompressors' own
stream objects turn 32 KiB of input into a GiB of output. For zstd that means parsing the block headers (RFC 8878,
3.1.1), because a block is at most 128 KiB. Does not own which bytes are asked for (decompress.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jackline.data.sources.bytefile import ByteFile
from jackline.data.sources.damage import DamagedBytes

_READ_BYTES = 1 << 18
_SCAN_BYTES = 1 << 20
_MAX_PIECE_BYTES = 1 << 20
_MAX_ZSTD_WINDOW_BYTES = 1 << 27  # a frame may ask for gigabytes; more than this would break the memory limit
_MAX_ZSTD_BLOCK_BYTES = 1 << 17
_MAX_BELIEVED_BYTES = 1 << 40  # of a frame's stated size, which may be damaged itself
_ZSTD_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50
_ZSTD_START = _ZSTD_MAGIC.to_bytes(4, "little")
_GZIP_START = b"\x1f\x8b\x08"
_USUAL_RATIO = 3.0  # text to compressed bytes, where nothing of a frame could be read


class Piece(NamedTuple):
    """Decompressed bytes, the start of their frame in the file, and the offset up to which the file was read."""

    data: bytes
    frame_start: int
    file_offset: int


class Gap(NamedTuple):
    """A part of the file that cannot be decompressed, and the start of the next frame (or the end of the file)."""

    damage: DamagedBytes
    resumes_at: int


class _Progress(NamedTuple):
    """How far one frame was read: its start, the offset of the damage and the bytes of text before it."""

    start: int
    at: int
    num_out: int

    def estimate(self, file_bytes: int) -> int:
        """Text in `file_bytes` more bytes of this frame, by what was read of it."""
        ratio = self.num_out / (self.at - self.start) if self.num_out and self.at > self.start else _USUAL_RATIO
        return max(1, int(ratio * file_bytes))

    def cut(self, reason: str, missing: int | None = None) -> DamagedBytes:
        """The file ends inside the frame. How much is missing is known only where the frame states its size and is
        the file's first; otherwise as much again as there is."""
        return DamagedBytes(reason, at=self.at, text_bytes=missing or self.estimate(max(1, self.at)))

    def broken(self, reason: str, resumes_at: int, missing: int | None = None) -> DamagedBytes:
        file_bytes = resumes_at - self.at
        return DamagedBytes(
            reason, at=self.at, file_bytes=file_bytes, text_bytes=missing or self.estimate(file_bytes)
        )

    def suspect(self, reason: str) -> DamagedBytes:
        return DamagedBytes(reason, at=self.start, text_bytes=self.num_out, is_suspect=True)


def gzip_pieces(file: ByteFile, offset: int) -> Iterator[Piece | Gap]:
    """Every member from the one that begins at `offset`."""
    decoder, start, num_out = None, offset, 0
    while data := file.read_at(offset, _READ_BYTES, at_least=1):
        while data:
            if decoder is None:
                if not data.strip(b"\0"):
                    offset += len(data)  # tapes and some tools pad gzip files with zeros
                    break
                decoder, start, num_out = zlib.decompressobj(wbits=31), offset, 0
            before = decoder.copy()  # 50 KB: nothing beside the megabyte that follows
            try:
                out = decoder.decompress(data, _MAX_PIECE_BYTES)
            except zlib.error as error:
                out, num_used = _before_damage(before, data)
                yield Piece(out, start, offset + num_used)
                progress = _Progress(start, offset + num_used, num_out + len(out))
                gap = _gzip_gap(file, progress, str(error))
                yield gap
                offset, decoder = gap.resumes_at, None
                break
            rest = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
            offset += len(data) - len(rest)
            num_out += len(out)
            if decoder.eof:
                decoder = None
            yield Piece(out, start, offset)
            data = rest
    if decoder is not None:
        yield Gap(_Progress(start, offset, num_out).cut("truncated gz file"), offset)


def _before_damage(decoder: Any, data: bytes) -> tuple[bytes, int]:
    """What `decoder` makes of `data` up to the byte at which it fails, and how many bytes that took."""
    out, used = bytearray(), 0
    for step in (4096, 64, 1):
        while used < len(data):
            trial = decoder.copy()
            try:
                part = trial.decompress(data[used : used + step])
            except zlib.error:
                break
            decoder, used = trial, used + step
            out += part
    return bytes(out), min(used, len(data))


def _gzip_gap(file: ByteFile, progress: _Progress, error: str) -> Gap:
    # An error may show up long after its cause: a member that was cut off runs into the header of the next one.
    first = max(progress.start + 1, progress.at - _SCAN_BYTES)
    resumes_at = _find(file, first, _GZIP_START, _is_gzip_member)
    if resumes_at < progress.at:
        progress = progress._replace(at=resumes_at)
    if "incorrect data check" in error or "incorrect length check" in error:
        return Gap(progress.suspect("damaged gz file: wrong checksum"), resumes_at)
    return Gap(progress.broken("damaged gz file", resumes_at), resumes_at)


def _is_gzip_member(file: ByteFile, offset: int) -> bool:
    head = file.read_at(offset, 1 << 16)
    if len(head) < 18 or head[3] & 0xE0 or 13 < head[9] < 255:
        return False
    decoder = zlib.decompressobj(wbits=31)
    try:
        return bool(decoder.decompress(head, 1 << 16)) or decoder.eof
    except zlib.error:
        return False


def _find(file: ByteFile, offset: int, start: bytes, is_one: Callable[[ByteFile, int], bool]) -> int:
    """The offset of the next frame from `offset` on; the end of the file if there is none."""
    while data := file.read_at(offset, _SCAN_BYTES):
        at = data.find(start)
        while at >= 0:
            if is_one(file, offset + at):
                return offset + at
            at = data.find(start, at + 1)
        if len(data) < _SCAN_BYTES:
            return offset + len(data)
        offset += len(data) - len(start) + 1
    return offset


def zstd_pieces(file: ByteFile, offset: int) -> Iterator[Piece | Gap]:
    """Every frame from the one that begins at `offset`, without skippable frames."""
    reader = _Exact(file, offset)
    while not reader.is_at_end():
        frame = _ZstdFrame(reader)
        yield from frame.pieces()
        if frame.damage is not None:
            resumes_at = frame.end or _find(file, frame.progress.at + 1, _ZSTD_START, _is_zstd_frame)
            yield Gap(frame.explain(resumes_at, is_cut=resumes_at >= (file.size() or resumes_at)), resumes_at)
            if resumes_at != reader.offset:
                reader = _Exact(file, resumes_at)


class _ZstdFrame:
    """One frame. After `pieces`: `damage` is the reason if it could not be read, `end` its end if that is known."""

    def __init__(self, reader: _Exact) -> None:
        self._reader = reader
        self.progress = _Progress(reader.offset, reader.offset, 0)
        self.damage: str | None = None
        self.end = 0
        self._size: int | None = None
        self._is_checksum = self._fails_checksum = False

    def pieces(self) -> Iterator[Piece]:
        import zstandard  # imported only for sources that need it

        start, num_out = self._reader.offset, 0
        decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES).decompressobj()
        parts = self._parts()
        try:
            for part in parts:
                out = decoder.decompress(part)
                num_out += len(out)
                self.progress = _Progress(start, self._reader.offset, num_out)
                yield Piece(out, start, self._reader.offset)
        except DamagedBytes as damage:
            self.damage = str(damage)
        except zstandard.ZstdError:
            self.damage, self._fails_checksum = "damaged zst file", self._is_checksum
            self.end = self._walk_on(parts)

    def explain(self, resumes_at: int, *, is_cut: bool) -> DamagedBytes:
        reason, progress = str(self.damage), self.progress
        missing = None
        if self._size is not None and progress.num_out < self._size <= _MAX_BELIEVED_BYTES:
            missing = self._size - progress.num_out
        if self._fails_checksum:
            return progress.suspect("damaged zst file: wrong checksum")
        if reason.startswith("truncated") and is_cut:
            return progress.cut(reason, missing if progress.start == 0 else None)
        return progress.broken("damaged zst file", resumes_at, missing)

    def _walk_on(self, parts: Iterator[bytes]) -> int:
        """The end of a frame whose content is damaged, if its block headers still lead there; else 0."""
        try:
            for _ in parts:
                pass
            end = self._reader.offset
            return end if self._reader.is_at_end() or self._reader.is_at_frame() else 0
        except DamagedBytes:
            return 0

    def _parts(self) -> Iterator[bytes]:
        """The frame as header, blocks and checksum; nothing of a skippable frame."""
        reader = self._reader
        head = reader.take(4)
        magic = int.from_bytes(head, "little")
        if magic & 0xFFFFFFF0 == _SKIPPABLE_MAGIC:
            reader.pass_over(int.from_bytes(reader.take(4), "little"))
            return
        if magic != _ZSTD_MAGIC:
            raise DamagedBytes("damaged zst file")
        descriptor = reader.take(1)[0]
        header = reader.take(_header_bytes(descriptor))
        self._size = _stated_size(descriptor, header)
        yield head + bytes([descriptor]) + header
        is_last = False
        while not is_last:
            block = reader.take(3)
            is_last, kind, size = _block_header(block)
            if kind == 3:
                raise DamagedBytes("damaged zst file")
            yield block + reader.take(1 if kind == 1 else size)
        if descriptor & 4:
            self._is_checksum = True
            yield reader.take(4)


def _header_bytes(descriptor: int) -> int:
    """Bytes of a frame's header after its descriptor."""
    is_single = bool(descriptor & 0x20)
    size_of_size = (int(is_single), 2, 4, 8)[descriptor >> 6]
    return (0 if is_single else 1) + (0, 1, 2, 4)[descriptor & 3] + size_of_size


def _stated_size(descriptor: int, header: bytes) -> int | None:
    """The size of the frame's text, where the header has it."""
    length = (int(bool(descriptor & 0x20)), 2, 4, 8)[descriptor >> 6]
    if not length:
        return None
    return int.from_bytes(header[len(header) - length :], "little") + (256 if length == 2 else 0)


def _block_header(block: bytes) -> tuple[bool, int, int]:
    word = int.from_bytes(block, "little")
    return bool(word & 1), word >> 1 & 3, word >> 3


def _is_zstd_frame(file: ByteFile, offset: int) -> bool:
    head = file.read_at(offset, 32)
    if len(head) < 9 or head[4] & 0x08:
        return False
    at = 5 + _header_bytes(head[4])
    _, kind, size = _block_header(head[at : at + 3])
    return len(head) >= at + 3 and kind != 3 and (kind == 1 or size <= _MAX_ZSTD_BLOCK_BYTES)


class _Exact:
    """Returns exactly as many bytes as asked for; otherwise the file is truncated, which is damage."""

    def __init__(self, file: ByteFile, offset: int) -> None:
        self._file = file
        self._buffer = b""
        self._used = 0
        self.offset = offset

    def is_at_end(self) -> bool:
        return self._used == len(self._buffer) and not self._fill(1)

    def is_at_frame(self) -> bool:
        if len(self._buffer) - self._used < 4 and not self._fill(4):
            return False
        magic = int.from_bytes(self._buffer[self._used : self._used + 4], "little")
        return magic == _ZSTD_MAGIC or magic & 0xFFFFFFF0 == _SKIPPABLE_MAGIC

    def take(self, count: int) -> bytes:
        if len(self._buffer) - self._used < count and not self._fill(count):
            raise DamagedBytes("truncated zst file")
        out = self._buffer[self._used : self._used + count]
        self._used += count
        self.offset += count
        return out

    def pass_over(self, count: int) -> None:
        size = self._file.size()
        if size is not None and self.offset + count > size:
            raise DamagedBytes("truncated zst file")
        self.offset += count
        self._buffer, self._used = b"", 0

    def _fill(self, count: int) -> bool:
        kept = self._buffer[self._used :]
        # Decompress what has arrived at once: a source that sends a document a second must not wait for a MiB.
        at_least = count - len(kept)
        data: Any = self._file.read_at(self.offset + len(kept), max(_READ_BYTES, count), at_least=at_least)
        self._buffer, self._used = kept + data, 0
        return len(self._buffer) >= count

"""Text that is not UTF-8: recognising its encoding, and reading it as UTF-8.

Owns: byte order marks, patterns of UTF-16 and UTF-32, the test for Windows-1252, and a stream that decodes while
every place stays a place of the file. What fits no encoding is never decoded: the file is counted as damaged. Does
not own which file is read when (documents.py).
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections import deque
from typing import Any, NamedTuple

from jackline.data.sources.bytefile import ByteFile, LocalFile
from jackline.data.sources.damage import DamagedBytes
from jackline.data.sources.decompress import START, At, Stream, open_stream
from jackline.errors import UsageError

UTF8 = "utf-8"
WITH_MARK = "utf-8-sig"
UNKNOWN = "unknown"
_NAMES = {
    UTF8: "UTF-8",
    WITH_MARK: "UTF-8 with a byte order mark",
    "utf-16-le": "UTF-16, little-endian",
    "utf-16-be": "UTF-16, big-endian",
    "utf-32-le": "UTF-32, little-endian",
    "utf-32-be": "UTF-32, big-endian",
    "cp1252": "Windows-1252 (Latin-1)",
    UNKNOWN: "not recognised",
}
_MARKS = (  # the longer ones first: UTF-32 begins like UTF-16
    (codecs.BOM_UTF8, WITH_MARK),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_STATEFUL = re.compile(r"iso2022|hz|utf-7|idna|punycode|unicode_escape|raw_unicode|utf-16$|utf-32$")
_HEAD_BYTES = 1 << 16
_SAMPLE_BYTES = 1 << 20
_SEARCHED_BYTES = 64 << 20  # of a local file, for its first byte that is not ASCII
_CHUNK_BYTES = 1 << 16
_KEEP_BYTES = 68 << 20  # places reach at most two records back
# Control characters that text does not have, bytes that Windows-1252 does not define, and letters that are rare.
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\f\v\x1a\x1b")) + b"\x7f"
_UNDEFINED = bytes([0x81, 0x8D, 0x8F, 0x90, 0x9D])
_RARE = bytes([0x83, 0x88, 0x98, 0xA4, 0xA6, 0xA8, 0xAC, 0xAF, 0xB8, 0xD7, 0xF7, 0xFF])
_HIGH = bytes(range(0x80, 0x100))
# A sign between two letters, as in Polish or Cyrillic text that is read as Windows-1252.
_SIGN_IN_WORD = re.compile(rb"[A-Za-z][\xa1-\xac\xae-\xb6\xb8-\xbf][a-z]")
_MIN_HIGH = 3


class HeadFile:
    """A remote file whose first bytes are read twice, without a second request: what is read in order while it is
    `is_recording` is kept."""

    def __init__(self, inner: ByteFile) -> None:
        self._inner = inner
        self._head = b""
        self.is_recording = True

    @property
    def name(self) -> str:
        return self._inner.name

    def size(self) -> int | None:
        return self._inner.size()

    def read_at(self, offset: int, count: int, *, at_least: int | None = None) -> bytes:
        known = self._head[offset : offset + count]
        needed = count if at_least is None else min(at_least, count)
        if len(known) >= needed > 0:
            return known
        rest = None if at_least is None else at_least - len(known)
        more = self._inner.read_at(offset + len(known), count - len(known), at_least=rest)
        if self.is_recording and offset + len(known) == len(self._head):
            self._head += more
        return known + more

    def identity(self) -> dict[str, Any]:
        return self._inner.identity()

    def check_same(self) -> None:
        self._inner.check_same()

    def close(self) -> None:
        self._inner.close()


class Recognised(NamedTuple):
    """`codec` is what Python calls it, "" for UTF-8; `name` is for people; `bad_at` is the first wrong byte."""

    codec: str
    name: str
    bad_at: int = 0


def check_encoding(name: str) -> None:
    """Raise UsageError for an encoding that cannot be read here."""
    if name == "auto":
        return
    try:
        found = codecs.lookup(name)
    except LookupError:
        found = None
    if found is None or not getattr(found, "_is_text_encoding", True):
        raise UsageError(
            f"there is no text encoding '{name}'", hint="for example: utf-8, cp1252, latin-1, utf-16-le, shift_jis"
        )
    if _STATEFUL.search(found.name) and found.name not in ("utf-16", "utf-32"):
        raise UsageError(
            f"encoding '{name}' cannot be read from the middle of a file", hint="convert the file to UTF-8 first"
        )


def recognise(file: ByteFile, compression: str, wanted: str = "auto", *, is_live: bool = False) -> Recognised:
    """The encoding of a file, from its beginning and its first bytes that are not ASCII."""
    codec = wanted if wanted == "auto" else codecs.lookup(wanted).name
    if codec not in ("auto", "utf-16", "utf-32"):
        return _named(codec)
    head, sample, offset = _read_sample(file, compression, is_live)
    if codec in ("utf-16", "utf-32"):
        wide = _by_mark(head) or _wide(head) or ""
        return _named(wide if wide.startswith(codec) else f"{codec}-le")
    if known := _by_mark(head) or _wide(head):
        return _named(known)
    found, bad_at = guess(sample)
    return Recognised(UNKNOWN, _NAMES[UNKNOWN], offset + bad_at) if found == UNKNOWN else _named(found)


def _named(codec: str) -> Recognised:
    return Recognised("" if codec in (UTF8, WITH_MARK) else codec, _NAMES.get(codec, codec))


def _read_sample(file: ByteFile, compression: str, is_live: bool) -> tuple[bytes, bytes, int]:
    """The head, a sample with bytes that are not ASCII, and the sample's offset. A live source is not waited for."""
    if is_live:
        head = b"" if compression else file.read_at(0, 4)
        return head, b"", 0
    if compression:
        try:
            data = open_stream(file, compression, START).read(_SAMPLE_BYTES)
        except DamagedBytes:
            data = b""
        return data[:_HEAD_BYTES], data, 0
    head = file.read_at(0, _HEAD_BYTES)
    if not isinstance(file, LocalFile) or not head.isascii():
        return head, head, 0
    for offset in range(len(head), _SEARCHED_BYTES, _SAMPLE_BYTES):
        data = file.read_at(offset, _SAMPLE_BYTES)
        if not data.isascii():
            # From a line on, so that no character is cut off at its beginning.
            first = next(at for at in itertools.count(0, 4096) if not data[at : at + 4096].isascii())
            return head, data[first:], offset + first
        if len(data) < _SAMPLE_BYTES:
            break
    return head, head, 0


def _by_mark(head: bytes) -> str | None:
    return next((codec for mark, codec in _MARKS if head.startswith(mark)), None)


def _wide(head: bytes) -> str | None:
    """UTF-16 or UTF-32 without a mark: valid as such, and its spaces and line ends are units of their own."""
    if b"\0" not in head:
        return None
    for codec, width in (("utf-32-le", 4), ("utf-32-be", 4), ("utf-16-le", 2), ("utf-16-be", 2)):
        whole = head[: len(head) // width * width]
        try:
            text = whole.decode(codec)
        except UnicodeDecodeError as error:
            if error.start < len(whole) - width:
                continue
            text = whole[: error.start].decode(codec)
        blanks = sum(map(text.count, ' \n{}",'))
        if blanks and 2 * blanks >= sum(map(whole.count, (b" ", b"\n", b"{", b"}", b'"', b","))) and "\0" not in text:
            return codec
    return None


def guess(sample: bytes) -> tuple[str, int]:
    """The encoding of text without a mark, and the first byte that is not UTF-8 where it is none."""
    try:
        sample.decode(UTF8)
        return UTF8, 0
    except UnicodeDecodeError as error:
        if error.end == len(sample) and error.reason == "unexpected end of data":
            return UTF8, 0  # the sample ends inside a character
        bad_at = error.start
    text = sample.decode(UTF8, "surrogateescape")
    num_bad = sum(map(text.count, map(chr, range(0xDC80, 0xDD00))))
    num_good = len(sample) - len(sample.translate(None, _HIGH)) - num_bad
    if num_good < num_bad / 10 and _is_windows_1252(sample):
        return "cp1252", bad_at
    is_damage = num_good >= num_bad or num_bad <= max(16, len(sample) // 50)
    return (UTF8 if is_damage else UNKNOWN), bad_at


def _is_windows_1252(sample: bytes) -> bool:
    num_high = len(sample) - len(sample.translate(None, _HIGH))
    num_rare = len(sample) - len(sample.translate(None, _RARE))
    has_others = len(sample.translate(None, _CONTROLS + _UNDEFINED)) < len(sample)
    num_signs = len(_SIGN_IN_WORD.findall(sample))
    is_mostly_ascii = num_high <= 0.3 * len(sample)
    return (
        num_high >= _MIN_HIGH
        and is_mostly_ascii
        and not has_others
        and num_rare <= num_high / 10
        and num_signs <= num_high / 20
    )


class _Chunk(NamedTuple):
    """Decoded bytes, the position of the first one, and the position of its source."""

    first: int
    source: int
    data: bytes


class DecodingStream:
    """A stream in another encoding, as UTF-8. A unit that is not valid becomes a lone surrogate, whose bytes are not
    valid UTF-8 either: its line is lost and located like any other damage."""

    def __init__(self, inner: Stream, codec: str) -> None:
        self._inner, self._codec = inner, codec
        self._errors = "surrogatepass" if codec.startswith("utf") else "surrogateescape"
        self._ready = bytearray()
        self._num_out = self._num_in = 0
        self._pending = b""
        self._chunks: deque[_Chunk] = deque()
        self._damage: DamagedBytes | None = None
        self._is_ended = False

    @property
    def file_offset(self) -> int:
        return self._inner.file_offset

    def read(self, count: int) -> bytes:
        while len(self._ready) < count and self._damage is None and self._decode_more(is_live=False):
            pass
        return self._take(count)

    def read_some(self) -> bytes:
        while not self._ready and self._damage is None and self._decode_more(is_live=True):
            pass
        return self._take(max(1, len(self._ready)))

    def _take(self, count: int) -> bytes:
        if count and not self._ready and self._damage is not None:
            damage, self._damage = self._damage, None
            raise damage
        out = bytes(self._ready[:count])
        del self._ready[:count]
        self._num_out += len(out)
        while len(self._chunks) > 1 and self._chunks[1].first + _KEEP_BYTES < self._num_out:
            self._chunks.popleft()
        return out

    def _decode_more(self, *, is_live: bool) -> bool:
        try:
            more = self._inner.read_some() if is_live else self._inner.read(_CHUNK_BYTES)
        except DamagedBytes as damage:
            self._damage, self._pending = damage, b""
            return False
        source = self._num_in - len(self._pending)
        self._num_in += len(more)
        data, is_end = self._pending + more, not more
        if is_end and (self._is_ended or not data):
            return False
        self._is_ended = is_end
        text, num_used = self._decode(data, is_end)
        self._pending = data[num_used:]
        out = text.encode(UTF8, "surrogatepass")
        self._chunks.append(_Chunk(self._num_out + len(self._ready), source, out))
        self._ready += out
        return True

    def _decode(self, data: bytes, is_end: bool) -> tuple[str, int]:
        if self._codec.startswith("utf-32"):
            return self._decode_utf32(data, is_end)
        if is_end:
            # What is left is a part of a unit: it stands for one character that is not valid.
            return ("\udfff", len(data)) if data else ("", 0)
        decoder: Any = codecs.getincrementaldecoder(self._codec)(self._errors)
        text: str = decoder.decode(data)
        return text, len(data) - len(decoder.getstate()[0])

    def _decode_utf32(self, data: bytes, is_end: bool) -> tuple[str, int]:
        import numpy as np

        if is_end:
            return "\udfff", len(data)
        units = np.frombuffer(data[: len(data) // 4 * 4], "<u4" if self._codec.endswith("le") else ">u4").copy()
        units[units > 0x10FFFF] = 0xDFFF
        return units.tobytes().decode(self._codec, "surrogatepass"), 4 * len(units)

    def place(self, back: int) -> At:
        position = self._num_out - back
        for chunk in reversed(self._chunks):
            if chunk.first <= position and chunk.data:
                before = chunk.data[: position - chunk.first]
                if len(before) == len(chunk.data) and chunk is self._chunks[-1]:
                    return self._inner.place(len(self._pending))
                text = codecs.utf_8_decode(before, "surrogatepass", False)[0]
                length = len(text.encode(self._codec, self._errors))
                return self._inner.place(self._num_in - chunk.source - length)
        return self._inner.place(self._num_in)

"""Bounded runs of whole records from a stream: lines, or blocks between blank lines.

Owns the borders of runs, which depend only on where a run begins, records that are too long, and where a long text
may be cut. Does not own what a record is (records.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jackline.data.sources.damage import DamagedBytes
from jackline.data.sources.decompress import START, At, Stream

RUN_BYTES = 1 << 20
MAX_RECORD_BYTES = 32 << 20
BOM = b"\xef\xbb\xbf"
BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
_OVERLAP_BYTES = 1 << 16
_BETWEEN_WORDS = re.compile(rb"[A-Za-z0-9](?= [A-Za-z])")


class Run(NamedTuple):
    """Whole records. `back`: how many bytes the stream has read since `data` began. `num_skipped`: bytes of a record
    that is too long (then `data` is empty), or that was cut off by `damage`."""

    data: bytes
    after: At
    back: int
    damage: DamagedBytes | None = None
    num_skipped: int = 0


class _Border(NamedTuple):
    """How records end: the pattern of an end, and a function for the last end in some bytes (0: there is none)."""

    pattern: re.Pattern[bytes]
    last: Callable[[bytes], int]


def _last_line_end(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _last_blank_line(data: bytes) -> int:
    for window in (1 << 12, 1 << 16, len(data)):
        ends = [found.end() for found in BLANK_LINES.finditer(data, max(0, len(data) - window))]
        if ends:
            return ends[-1]
    return 0


_LINES = _Border(re.compile(rb"\n"), _last_line_end)
_BLOCKS = _Border(BLANK_LINES, _last_blank_line)


def whole_lines(stream: Stream) -> Iterator[Run]:
    return _whole_runs(stream, _LINES)


def whole_blocks(stream: Stream) -> Iterator[Run]:
    return _whole_runs(stream, _BLOCKS)


def arriving_lines(stream: Stream) -> Iterator[Run]:
    """Each line as a run of its own, returned as soon as its end has arrived. The lines are those of `whole_lines`.
    Each takes a few microseconds more, but no line waits for the next ones of a slow source."""
    rest, num_seen = bytearray(), 0
    is_first = stream.place(0) == START
    while True:
        end = rest.find(b"\n", num_seen)
        if end >= 0:
            line = bytes(rest[: end + 1])
            del rest[: end + 1]
            num_seen = 0
            line = line.removeprefix(BOM) if is_first else line
            yield Run(line, stream.place(len(rest)), len(line) + len(rest))
            is_first = False
            continue
        num_seen = len(rest)
        if num_seen > MAX_RECORD_BYTES:
            run, left = _pass_over_record(stream, bytes(rest), _LINES)
            rest, num_seen = bytearray(left), 0
            yield run
            continue
        try:
            more = stream.read_some()
        except DamagedBytes as damage:
            yield Run(b"", stream.place(0), 0, damage, len(rest))
            rest, num_seen = bytearray(), 0
            continue
        rest += more
        if not more:
            if rest:
                line = bytes(rest).removeprefix(BOM) if is_first else bytes(rest)
                yield Run(line, stream.place(0), len(line))
            return


def _whole_runs(stream: Stream, border: _Border) -> Iterator[Run]:
    """Runs of whole records. Each looks at exactly RUN_BYTES from its own start, so the borders are the same whether
    reading continued or resumed there."""
    rest = b""
    is_first = stream.place(0) == START
    while True:
        data = rest
        try:
            data += stream.read(max(0, RUN_BYTES - len(rest)))
            data = data.removeprefix(BOM) if is_first else data
            is_first = False
            cut = border.last(data)
            while not cut and len(data) <= MAX_RECORD_BYTES and (more := stream.read(RUN_BYTES)):
                seen = max(0, len(data) - _OVERLAP_BYTES)  # the bytes before it contain no end of a record
                data += more
                found = border.last(data[seen:])
                cut = seen + found if found else 0
        except DamagedBytes as damage:
            yield Run(b"", stream.place(0), 0, damage, len(data))
            rest = b""
            continue
        if cut:
            rest = data[cut:]
            yield Run(data[:cut], stream.place(len(rest)), len(data))
        elif len(data) > MAX_RECORD_BYTES:
            run, rest = _pass_over_record(stream, data, border)
            yield run
        else:
            if data:
                yield Run(data, stream.place(0), len(data))
            return


def _pass_over_record(stream: Stream, data: bytes, border: _Border) -> tuple[Run, bytes]:
    """Read to the end of a record that is too long, of which `data` is the beginning. Returns its run, and the bytes
    that were read after its end."""
    num_read, tail = len(data), data[-_OVERLAP_BYTES:]
    try:
        while more := stream.read(RUN_BYTES):
            data = tail + more
            num_read += len(more)
            end = border.pattern.search(data)
            if end is not None:
                rest = data[end.end() :]
                return Run(b"", stream.place(len(rest)), len(rest), None, num_read - len(rest)), rest
            tail = data[-_OVERLAP_BYTES:]
    except DamagedBytes as damage:
        return Run(b"", stream.place(0), 0, damage, num_read), b""
    return Run(b"", stream.place(0), 0, None, num_read), b""


def whole_characters(data: bytes, is_cut_off: bool) -> int:
    end = len(data)
    for back in range(4 if is_cut_off else 0):
        if not _cuts_character(data, end - back):
            return end - back
    return end


def safe_cut(data: bytes, limit: int) -> int:
    """Where to cut `data` at or before `limit` so that the pieces' tokens are those of the whole.

    The cut is before a space between two words, because no byte-level pre-tokenizer joins across that place; else
    after a line; else between two characters.
    """
    for window in (1 << 12, 1 << 16):
        places = [match.end() for match in _BETWEEN_WORDS.finditer(data, max(0, limit - window), limit)]
        if places:
            return places[-1]
    newline = data.rfind(b"\n", 0, limit - 1)
    if newline >= 0:
        return newline + 1
    for back in range(4):  # no character is longer, so further back the bytes are damaged
        if limit - back > 0 and not _cuts_character(data, limit - back):
            return limit - back
    return limit


def _cuts_character(data: bytes, at: int) -> bool:
    if at < len(data):
        return data[at] & 0xC0 == 0x80
    for back in range(1, min(4, at) + 1):
        byte = data[at - back]
        if byte & 0xC0 != 0x80:
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False

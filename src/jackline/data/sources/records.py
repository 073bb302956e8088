"""Runs of records from line-based text: jsonl, and txt by line, by blank-line block or whole.

Owns: cutting a stream into bounded runs whose borders depend only on where the run begins (so that reading can resume
at any run), taking the text out of each record, and naming what is wrong with a record that has none. A record is
damaged only for a cause in its bytes. Does not own filters or splits (documents.py), nor csv and parquet (tables.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jackline.data.sources.decompress import START, At, Stream
from jackline.data.sources.frames import DamagedBytes
from jackline.units import format_bytes

RUN_BYTES = 1 << 20
MAX_RECORD_BYTES = 32 << 20
TOO_LONG = f"record longer than {format_bytes(MAX_RECORD_BYTES)}"
BAD_JSON = "bad JSON line"
NOT_UNICODE = "text is not valid Unicode"
NO_COLUMN = "no text column"
NOT_TEXT = "text column is not text"
EMPTY_FILE = "empty file"

_DECODER = json.JSONDecoder()
_BOM = b"\xef\xbb\xbf"
_BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
_LEADING_BLANK_LINES = re.compile(rb"(?:[ \t\r]*\n)+")
_OVERLAP_BYTES = 1 << 16
_BETWEEN_WORDS = re.compile(rb"[A-Za-z0-9](?= [A-Za-z])")


@dataclass(slots=True)
class Records:
    """A run: texts in order (valid UTF-8), what was damaged, and where the next run begins."""

    texts: list[bytes]
    after: At
    damaged: dict[str, int] = field(default_factory=dict)
    starts_inside: bool = False  # texts[0] continues the document that the previous run left open
    ends_inside: bool = False  # texts[-1] continues in the next run
    file_offset: int = 0

    def add_damage(self, reason: str, count: int = 1) -> None:
        self.damaged[reason] = self.damaged.get(reason, 0) + count


def jsonl_records(stream: Stream, column: str, *, is_live: bool = False) -> Iterator[Records]:
    """One JSON object a line, the text under `column`; `is_live`: every line is a run of its own."""
    for run in arriving_lines(stream) if is_live else whole_lines(stream):
        records = Records([], run.after, file_offset=stream.file_offset)
        if run.damage:
            records.add_damage(run.damage)
        for line in _decoded_lines(run.data):
            _take_json(line, column, records)
        yield records


def line_records(stream: Stream) -> Iterator[Records]:
    """One document a line."""
    for run in whole_lines(stream):
        records = Records([], run.after, file_offset=stream.file_offset)
        if run.damage:
            records.add_damage(run.damage)
        _add_valid([line.removesuffix(b"\r") for line in run.data.split(b"\n") if line], records)
        yield records


def block_records(stream: Stream) -> Iterator[Records]:
    """Documents with blank lines between them."""
    for run in _whole_runs(stream, _BLOCKS):
        records = Records([], run.after, file_offset=stream.file_offset)
        if run.damage:
            records.add_damage(run.damage)
        begin = _LEADING_BLANK_LINES.match(run.data)
        data = run.data[begin.end() :] if begin else run.data
        blocks = _BLANK_LINES.split(data)
        _add_valid([block.strip(b"\r\n") for block in blocks if block.strip()], records)
        yield records


def whole_file_records(stream: Stream) -> Iterator[Records]:
    """The file is one document, returned in pieces of at most one run; an empty file gives one empty text."""
    rest, is_first = b"", stream.place(0) == START
    starts_inside, is_last = not is_first, False
    while not is_last:
        data = rest + stream.read(RUN_BYTES - len(rest))
        is_last = len(data) < RUN_BYTES
        damage = _damage_after(stream) if is_last else None
        cut = _whole_characters(data, damage is not None) if is_last else safe_cut(data, RUN_BYTES)
        text, rest = data[:cut], b"" if is_last else data[cut:]
        if is_first:
            text, is_first = text.removeprefix(_BOM), False
        records = Records([text], stream.place(len(rest)), file_offset=stream.file_offset)
        records.starts_inside, records.ends_inside = starts_inside, damage is not None or not is_last
        if not is_valid(text):
            # The text before it was already returned; the rest of this file is dropped and counted.
            records.texts, records.ends_inside = ([b""] if starts_inside else []), False
            records.add_damage(NOT_UNICODE)
            is_last, damage = True, None
        yield records
        starts_inside = True
        if damage is not None:
            raise damage


def _damage_after(stream: Stream) -> DamagedBytes | None:
    """Why the bytes ended, if they ended too early."""
    try:
        stream.read(1)
    except DamagedBytes as damage:
        return damage
    return None


def _whole_characters(data: bytes, is_cut_off: bool) -> int:
    end = len(data)
    while is_cut_off and end and _cuts_character(data, end):
        end -= 1
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
    while limit > 1 and _cuts_character(data, limit):
        limit -= 1
    return limit


def _cuts_character(data: bytes, at: int) -> bool:
    if at < len(data):
        return data[at] & 0xC0 == 0x80
    for back in range(1, min(4, at) + 1):
        byte = data[at - back]
        if byte & 0xC0 != 0x80:
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def is_valid(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


class _Run(NamedTuple):
    data: bytes
    after: At
    damage: str | None


class _Border(NamedTuple):
    """How records end: the pattern of an end, and a function for the last end in some bytes (0: there is none)."""

    pattern: re.Pattern[bytes]
    last: Callable[[bytes], int]


def _last_line_end(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def _last_blank_line(data: bytes) -> int:
    for window in (1 << 12, 1 << 16, len(data)):
        ends = [found.end() for found in _BLANK_LINES.finditer(data, max(0, len(data) - window))]
        if ends:
            return ends[-1]
    return 0


_LINES = _Border(re.compile(rb"\n"), _last_line_end)
_BLOCKS = _Border(_BLANK_LINES, _last_blank_line)


def whole_lines(stream: Stream) -> Iterator[_Run]:
    return _whole_runs(stream, _LINES)


def arriving_lines(stream: Stream) -> Iterator[_Run]:
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
            yield _Run(line.removeprefix(_BOM) if is_first else line, stream.place(len(rest)), None)
            is_first = False
            continue
        num_seen = len(rest)
        if num_seen > MAX_RECORD_BYTES:
            rest, num_seen = bytearray(_pass_over_record(stream, bytes(rest[-_OVERLAP_BYTES:]), _LINES)), 0
            yield _Run(b"", stream.place(len(rest)), TOO_LONG)
        elif more := stream.read_some():
            rest += more
        else:
            if rest:
                yield _Run(bytes(rest).removeprefix(_BOM) if is_first else bytes(rest), stream.place(0), None)
            return


def _whole_runs(stream: Stream, border: _Border) -> Iterator[_Run]:
    """Runs of whole records. Each looks at exactly RUN_BYTES from its own start, so the borders are the same whether
    reading continued or resumed there."""
    rest = b""
    is_first = stream.place(0) == START
    while True:
        data = rest + stream.read(max(0, RUN_BYTES - len(rest)))
        data = data.removeprefix(_BOM) if is_first else data
        is_first = False
        cut = border.last(data)
        while not cut and len(data) <= MAX_RECORD_BYTES and (more := stream.read(RUN_BYTES)):
            seen = max(0, len(data) - _OVERLAP_BYTES)  # the bytes before it contain no end of a record
            data += more
            found = border.last(data[seen:])
            cut = seen + found if found else 0
        if cut:
            rest = data[cut:]
            yield _Run(data[:cut], stream.place(len(rest)), None)
        elif len(data) > MAX_RECORD_BYTES:
            rest = _pass_over_record(stream, data[-_OVERLAP_BYTES:], border)
            yield _Run(b"", stream.place(len(rest)), TOO_LONG)
        else:
            if data:
                yield _Run(data, stream.place(0), None)
            return


def _pass_over_record(stream: Stream, tail: bytes, border: _Border) -> bytes:
    """Read to the end of a record that is too long, whose last bytes so far are `tail`. Returns the bytes that were
    read after its end."""
    while more := stream.read(RUN_BYTES):
        data = tail + more
        end = border.pattern.search(data)
        if end is not None:
            return data[end.end() :]
        tail = data[-_OVERLAP_BYTES:]
    return b""


def _decoded_lines(data: bytes) -> Iterator[str | None]:
    """Lines as text; None for a line that is not UTF-8. All are decoded at once if possible: a third of the cost."""
    try:
        yield from data.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        for line in data.split(b"\n"):
            yield line.decode("utf-8") if is_valid(line) else None


def _take_json(line: str | None, column: str, records: Records) -> None:
    if line is None:
        records.add_damage(NOT_UNICODE)
        return
    if not line or line.isspace():
        return
    try:
        text = _parse(line)[column]
        records.texts.append(b"" if text is None else text.encode("utf-8"))
    except UnicodeEncodeError:
        records.add_damage(NOT_UNICODE)
    except AttributeError:
        records.add_damage(NOT_TEXT)
    except (KeyError, TypeError):
        records.add_damage(NO_COLUMN)
    except (ValueError, RecursionError):
        records.add_damage(BAD_JSON)


def _parse(line: str) -> Any:
    """`json.loads` without its two searches for white space around the object, a quarter of the time of a record."""
    if line[0] != "{":
        return json.loads(line)
    value, end = _DECODER.raw_decode(line)
    if end != len(line) and not line[end:].isspace():
        raise ValueError("extra data")
    return value


def _add_valid(texts: list[bytes], records: Records) -> None:
    for text in texts:
        if is_valid(text):
            records.texts.append(text)
        else:
            records.add_damage(NOT_UNICODE)

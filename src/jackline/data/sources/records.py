"""Runs of records from line-based text: jsonl, and txt by line, by blank-line block, whole or in sections.

Owns: taking the text out of each record, and locating what cannot be read. A record is damaged only for a cause in
its bytes, and only its own line is lost. Does not own where runs begin and end (runs.py), filters or splits
(documents.py), nor csv (tables.py) and parquet (parquet.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jackline.data.sources.damage import KEPT_PLACES, NOT_UNICODE, NOTHING, DamagedBytes, Lost, Place
from jackline.data.sources.decompress import START, At, Stream
from jackline.data.sources.runs import (
    BLANK_LINES,
    BOM,
    MAX_RECORD_BYTES,
    RUN_BYTES,
    Run,
    arriving_lines,
    safe_cut,
    whole_blocks,
    whole_characters,
    whole_lines,
)
from jackline.units import format_bytes

TOO_LONG = f"record longer than {format_bytes(MAX_RECORD_BYTES)}"
BAD_JSON = "bad JSON line"
NO_COLUMN = "no text column"
NOT_TEXT = "text column is not text"
EMPTY_FILE = "empty file"

_NEWLINE = 10
_DECODER = json.JSONDecoder()
_LEADING = re.compile(rb"(?:[ \t\r]*\n)+")
_LONG_LINE_BYTES = 4096  # of a line longer than this only the part around a bad byte is lost


@dataclass(slots=True)
class Records:
    """A run: texts in order (valid UTF-8), what was damaged, and where the next run begins."""

    texts: list[bytes]
    after: At
    damaged: dict[str, int] = field(default_factory=dict)
    starts_inside: bool = False  # texts[0] continues the document that the previous run left open
    ends_inside: bool = False  # texts[-1] continues in the next run
    is_section: bool = False  # texts[0] is a section, which belongs to a split by its number
    encoding: str = ""  # for people, in the first run of a file that is not UTF-8
    file_offset: int = 0
    num_lines: int = 0
    lost: Lost = NOTHING
    has_gap: bool = False  # after which the numbers of lines are not known
    gap_bytes: int = 0  # of text, in documents whose number can only be estimated

    def add_damage(
        self,
        reason: str,
        count: int = 1,
        *,
        num_bytes: int = 0,
        place: At = (),
        line: int = 0,
        is_record: bool = True,
    ) -> None:
        """`line` counts from 1 inside the run. `is_record`: a whole document is lost, not a part of one."""
        self.damaged[reason] = self.damaged.get(reason, 0) + count
        places: tuple[Place, ...] = ()
        if place and len(self.lost.places) < KEPT_PLACES:
            places = (Place(reason, "", place[0], place[1], line, num_bytes),)
        self.lost = self.lost.plus(Lost(0, num_bytes, records=count if is_record else 0, places=places))

    def add_gap(self, damage: DamagedBytes, num_partial: int = 0) -> None:
        """Bytes that cannot be decompressed, and `num_partial` bytes of a record that was cut off before them."""
        reason = str(damage)
        self.damaged[reason] = self.damaged.get(reason, 0) + 1
        found = damage.text_bytes
        place = Place(reason, "", damage.at, 0, self.num_lines + 1, found + num_partial)
        if damage.is_suspect:
            lost = Lost(0, num_partial, damage.file_bytes, found, places=(place,))
        else:
            lost = Lost(found, found + num_partial, damage.file_bytes, places=(place,))
        self.lost = self.lost.plus(lost)
        self.has_gap = True

    def add_seen(self, num_bytes: int, num_lines: int = 0) -> None:
        self.lost = self.lost.plus(Lost(num_bytes))
        self.num_lines += num_lines


def jsonl_records(stream: Stream, column: str, *, is_live: bool = False) -> Iterator[Records]:
    """One JSON object a line, the text under `column`; `is_live`: every line is a run of its own."""
    for run in arriving_lines(stream) if is_live else whole_lines(stream):
        records = _records_of(run, stream)
        bad, number = [], 0
        for number, line in enumerate(_decoded_lines(run.data)):
            if reason := _take_json(line, column, records):
                bad.append((number, reason))
        records.num_lines += number
        if bad:
            _lose_lines(bad, run, stream, records)
        yield records


def line_records(stream: Stream) -> Iterator[Records]:
    """One document a line."""
    for run in whole_lines(stream):
        records = _records_of(run, stream)
        lines = run.data.split(b"\n")
        records.num_lines += len(lines) - 1
        if not run.data.isascii():
            # Each line by itself: most are ASCII, which is checked much faster than a run in which one line is not.
            bad = [(number, NOT_UNICODE) for number, line in enumerate(lines) if not is_valid(line)]
            if bad:
                _lose_lines(bad, run, stream, records)
                lines = [line for line in lines if is_valid(line)]
        if b"\r" in run.data:
            lines = [line.removesuffix(b"\r") for line in lines if line]
        records.texts = [line for line in lines if line]
        yield records


def block_records(stream: Stream) -> Iterator[Records]:
    """Documents with blank lines between them. A line that cannot be read is lost from its block."""
    for run in whole_blocks(stream):
        records = _records_of(run, stream)
        records.num_lines += count_lines(run.data)
        records.texts = _blocks(run.data)
        if not run.data.isascii() and not all(map(is_valid, records.texts)):
            records.texts = _blocks(_without_bad_lines(run.data, run.back, stream, records))
        yield records


def _blocks(data: bytes) -> list[bytes]:
    begin = _LEADING.match(data)
    blocks = BLANK_LINES.split(data[begin.end() :] if begin else data)
    return [block.strip(b"\r\n") for block in blocks if block.strip()]


def _records_of(run: Run, stream: Stream) -> Records:
    records = Records([], run.after, file_offset=stream.file_offset)
    records.add_seen(len(run.data) + run.num_skipped)
    if run.damage is not None:
        records.add_gap(run.damage, run.num_skipped)
        records.gap_bytes = records.lost.text_bytes
    elif run.num_skipped:
        records.num_lines = 1
        is_near = run.back + run.num_skipped <= 2 * MAX_RECORD_BYTES  # further back a place may be forgotten
        place = stream.place(run.back + run.num_skipped) if is_near else ()
        records.add_damage(TOO_LONG, num_bytes=run.num_skipped, place=place, line=1)
    return records


def _lose_lines(bad: list[tuple[int, str]], run: Run, stream: Stream, records: Records) -> None:
    """Count lines, given by their numbers in the run and the reasons."""
    lines = run.data.split(b"\n")
    first, start = 0, 0
    for number, reason in bad:
        num_bytes = len(lines[number]) + (number < len(lines) - 1)
        if len(records.lost.places) < KEPT_PLACES:
            start += sum(map(len, lines[first:number])) + number - first
            first = number
            records.add_damage(reason, num_bytes=num_bytes, place=stream.place(run.back - start), line=number + 1)
        else:
            records.add_damage(reason, num_bytes=num_bytes)


@dataclass(frozen=True)
class Pieces:
    """How a file that is one document is divided into runs: their size, and where to cut before it."""

    num_bytes: int = RUN_BYTES
    cut: Callable[[bytes, int], int] = safe_cut
    are_sections: bool = False


WHOLE = Pieces()


def whole_file_records(stream: Stream, pieces: Pieces = WHOLE) -> Iterator[Records]:
    """The file is one document, returned in pieces of at most one run; an empty file gives one empty text.

    A line that is not valid UTF-8 is lost, and so is what cannot be decompressed; the document continues after it.
    """
    size = pieces.num_bytes
    rest, is_first = b"", stream.place(0) == START
    starts_inside, is_last = not is_first, False
    while not is_last:
        data, gap = rest, None
        try:
            data += stream.read(size - len(rest))
            if len(data) < size:
                is_last = not stream.read(1)
        except DamagedBytes as damage:
            gap = damage
        is_short = is_last or gap is not None
        cut = whole_characters(data, gap is not None) if is_short else pieces.cut(data, size)
        text, rest = data[:cut], b"" if is_short else data[cut:]
        records = Records([text], stream.place(len(rest)), file_offset=stream.file_offset)
        records.add_seen(len(text), count_lines(text))
        if gap is not None:
            records.add_gap(gap, len(data) - cut)
            records.add_seen(len(data) - cut)
        if not is_valid(text):
            # After damage the stream is at the next frame: places before it are no longer known.
            back = -1 if gap is not None else len(rest) + len(text)
            records.texts[0] = text = _without_bad_lines(text, back, stream, records)
        if is_first:
            records.texts[0], is_first = text.removeprefix(BOM), False
        records.starts_inside, records.ends_inside = starts_inside, not is_last
        records.is_section = pieces.are_sections
        yield records
        starts_inside = True


def _without_bad_lines(data: bytes, back: int, stream: Stream, records: Records) -> bytes:
    """`data` without the lines that are not valid UTF-8, each counted at its place. `data` begins `back` bytes before
    where the stream is now; less than 0: not known."""
    kept, at = [], 0
    while at < len(data):
        try:
            data[at:].decode("utf-8")
            break
        except UnicodeDecodeError as error:
            start, end = _lost_span(data, at + error.start, at + error.end, at)
        kept.append(data[at:start])
        place = stream.place(back - start) if back >= 0 and len(records.lost.places) < KEPT_PLACES else ()
        line = data.count(b"\n", 0, start) + 1 if place else 0
        records.add_damage(NOT_UNICODE, num_bytes=end - start, place=place, line=line, is_record=False)
        at = end
    return b"".join([*kept, data[at:]])


def _lost_span(data: bytes, bad: int, end_of_bad: int, first: int) -> tuple[int, int]:
    """The line around bad bytes, with its end; of a long line only the words around them."""
    low, high = max(first, bad - _LONG_LINE_BYTES), min(len(data), end_of_bad + _LONG_LINE_BYTES)
    start = data.rfind(b"\n", low, bad) + 1 or (first if low == first else data.rfind(b" ", low, bad) + 1 or bad)
    end = data.find(b"\n", end_of_bad, high) + 1
    if not end:
        space = data.find(b" ", end_of_bad, high)
        end = len(data) if high == len(data) else space if space >= 0 else end_of_bad
    return max(start, first), end


def count_lines(data: bytes) -> int:
    """`data.count(b"\\n")` in a ninth of the time. Counted as it is read: damage in a later run needs its line."""
    import numpy as np  # `jackline data` starts without it

    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == _NEWLINE))


def is_valid(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decoded_lines(data: bytes) -> Iterator[str | None]:
    """Lines as text; None for a line that is not UTF-8. All are decoded at once if possible: a third of the cost."""
    try:
        yield from data.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        for line in data.split(b"\n"):
            yield line.decode("utf-8") if is_valid(line) else None


def _take_json(line: str | None, column: str, records: Records) -> str | None:
    """Add the line's text; returns the reason if it has none."""
    if line is None:
        return NOT_UNICODE
    if not line or line.isspace():
        return None
    try:
        text = _parse(line)[column]
        records.texts.append(b"" if text is None else text.encode("utf-8"))
    except UnicodeEncodeError:
        return NOT_UNICODE
    except AttributeError:
        return NOT_TEXT
    except (KeyError, TypeError):
        return NO_COLUMN
    except (ValueError, RecursionError):
        return BAD_JSON
    return None


def _parse(line: str) -> Any:
    """`json.loads` without its two searches for white space around the object, a quarter of the time of a record."""
    if line[0] != "{":
        return json.loads(line)
    value, end = _DECODER.raw_decode(line)
    if end != len(line) and not line[end:].isspace():
        raise ValueError("extra data")
    return value

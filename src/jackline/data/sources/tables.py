"""Runs of records from csv and tsv files.

Owns: streaming one text column of a table, and locating rows that cannot be read. Does not own which column it is
(formats.py).
"""

from __future__ import annotations

import contextlib
import csv
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jackline.data.sources.damage import NOT_UNICODE, DamagedBytes
from jackline.data.sources.decompress import START, Stream
from jackline.data.sources.records import Records
from jackline.data.sources.runs import MAX_RECORD_BYTES, RUN_BYTES

BAD_ROW = "bad csv row"
NEVER_CLOSED = "csv quote never closed"
ENDLESS_LINE = "csv line without end"
# If this many lines after a quote that never closes look like rows, they are rows and not the rest of a long cell.
_ENOUGH_ROWS, _ENOUGH_SHARE = 10, 0.95


class EndlessRecord(csv.Error):
    """The current record is longer than the limit."""


class EndlessLine(csv.Error):
    """A line was longer than the limit and was passed over."""


class LineFeed:
    """Lines of a stream for `csv.reader`; it counts what was used, and the bytes that were read but not yet used.

    With `keeps_record` it also keeps the lines of the current record, so that they can be read again.
    """

    def __init__(self, stream: Stream, *, keeps_record: bool = False) -> None:
        self._stream = stream
        self._buffer = b""
        self._used = 0
        self.num_bytes = 0  # used since the beginning, like num_lines
        self.num_lines = 0
        self.record_bytes = 0
        self.record: list[bytes] | None = [] if keeps_record else None

    def __iter__(self) -> LineFeed:
        return self

    def __next__(self) -> str:
        end = self._buffer.find(b"\n", self._used)
        while end < 0:
            if len(self._buffer) - self._used > MAX_RECORD_BYTES:
                self._pass_over_line()
            more = self._read()
            if not more:
                break
            self._buffer, self._used = self._buffer[self._used :] + more, 0
            end = self._buffer.find(b"\n", self._used)
        end = len(self._buffer) if end < 0 else end + 1
        line = self._buffer[self._used : end]
        if not line:
            raise StopIteration
        if self.record is not None:
            if self.record and self.record_bytes + len(line) > MAX_RECORD_BYTES:
                raise EndlessRecord  # the line stays unused
            self.record.append(line)
        self._use(len(line), 1)
        self._used = end
        # Bytes that are not UTF-8 become lone surrogates, which only matter in the column that is used.
        return line.decode("utf-8", "surrogateescape")

    def begin_record(self) -> None:
        self.record, self.record_bytes = [], 0

    def give_back(self, lines: Sequence[bytes]) -> None:
        """Return these lines next."""
        self._buffer, self._used = b"".join(lines) + self._buffer[self._used :], 0
        self.num_bytes -= sum(map(len, lines))
        self.num_lines -= len(lines)

    def drain(self) -> int:
        """Read to the end of the file. Returns the number of bytes."""
        before = self.num_bytes
        self._use(self.num_unused, 0)
        self._buffer, self._used = b"", 0
        while True:
            try:
                more = self._stream.read(RUN_BYTES)
            except DamagedBytes as damage:
                self._use(damage.text_bytes, 0)
                continue
            if not more:
                return self.num_bytes - before
            self._use(len(more), more.count(b"\n"))

    @property
    def num_unused(self) -> int:
        return len(self._buffer) - self._used

    def _use(self, num_bytes: int, num_lines: int) -> None:
        self.num_bytes += num_bytes
        self.record_bytes += num_bytes
        self.num_lines += num_lines

    def _read(self) -> bytes:
        try:
            return self._stream.read(RUN_BYTES)
        except DamagedBytes:
            self._use(self.num_unused, 0)  # of a line that was cut off
            self._buffer, self._used = b"", 0
            raise

    def _pass_over_line(self) -> None:
        end = -1
        while end < 0 and (more := self._read()):
            self._use(self.num_unused, 0)
            self._buffer, self._used = more, 0
            end = more.find(b"\n")
        self._used = len(self._buffer) if end < 0 else end + 1
        self._use(self._used, 1)
        raise EndlessLine


def csv_header(stream: Stream, delimiter: str) -> list[str]:
    csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        names = next(csv.reader(LineFeed(stream), delimiter=delimiter), [])
    except csv.Error as error:
        raise DamagedBytes("bad csv header") from error
    return [name.removeprefix("\ufeff").strip() for name in names]


def csv_records(stream: Stream, header: list[str], column: str, delimiter: str) -> Iterator[Records]:
    """Rows after the header; quoted line ends are part of a row."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    is_at_start = stream.place(0) == START
    feed = LineFeed(stream, keeps_record=True)
    rows = csv.reader(feed, delimiter=delimiter, strict=True)
    if is_at_start:
        with contextlib.suppress(csv.Error):  # the names were read by csv_header, which accepts more
            next(rows, None)
    run = _CsvRun(stream, feed, header.index(column), len(header))
    for row in _rows_or_damage(rows, feed, delimiter, len(header)):
        run.take(row)
        if run.size >= RUN_BYTES:
            yield run.finish()
    yield run.finish()


class _CsvRun:
    """The rows of one run."""

    def __init__(self, stream: Stream, feed: LineFeed, index: int, num_columns: int) -> None:
        self._stream, self._feed, self._index, self._num_columns = stream, feed, index, num_columns
        self._is_after_gap = False
        self._before = (0, 0)
        self.size = 0
        self.records = Records([], START)

    def finish(self) -> Records:
        """The run up to here; the next one begins."""
        records, feed = self.records, self._feed
        num_bytes, num_lines = self._before
        records.add_seen(feed.num_bytes - num_bytes, feed.num_lines - num_lines)
        records.after, records.file_offset = self._stream.place(feed.num_unused), self._stream.file_offset
        self.records, self.size, self._before = Records([], START), 0, (feed.num_bytes, feed.num_lines)
        return records

    def take(self, row: list[str] | str | Rescued | DamagedBytes) -> None:
        if isinstance(row, DamagedBytes):
            self.records.add_gap(row, self._feed.record_bytes)
            self.records.gap_bytes += row.text_bytes
            self._is_after_gap, self.size = True, RUN_BYTES
        elif isinstance(row, str):
            self._lose(row, self._feed.record_bytes)
        elif isinstance(row, Rescued):
            for good in row.rows:
                self._take_cell(good, 0)
            if row.num_bad:
                self.records.add_damage(BAD_ROW, row.num_bad, num_bytes=row.bad_bytes)
            self.size = RUN_BYTES  # the run ends here, so that heavy damage is noticed soon
        elif row:
            is_cut_off = self._is_after_gap and len(row) != self._num_columns
            self.size += self._take_cell([] if is_cut_off else row, self._feed.record_bytes)
            self._is_after_gap = False

    def _take_cell(self, row: list[str], num_bytes: int) -> int:
        if self._index >= len(row):
            self._lose(BAD_ROW, num_bytes)
            return 64
        try:
            text = row[self._index].encode("utf-8")
        except UnicodeEncodeError:
            self._lose(NOT_UNICODE, num_bytes or sum(len(cell.encode("utf-8", "surrogateescape")) for cell in row))
            return 64
        self.records.texts.append(text)
        return sum(map(len, row)) + len(row)

    def _lose(self, reason: str, num_bytes: int) -> None:
        feed = self._feed
        is_known = 0 < feed.record_bytes <= MAX_RECORD_BYTES
        place = self._stream.place(feed.num_unused + feed.record_bytes) if is_known else ()
        line = feed.num_lines - len(feed.record or []) - self._before[1] + 1
        self.records.add_damage(reason, num_bytes=num_bytes, place=place, line=max(1, line))


@dataclass(frozen=True)
class Rescued:
    """What follows a quote that never closes: whole rows, the number of lines that are not rows, and lines to be read
    again."""

    rows: list[list[str]]
    num_bad: int
    rest: list[bytes]
    bad_bytes: int = 0


def rescue_rows(lines: Sequence[bytes], delimiter: str, num_columns: int) -> Rescued | None:
    """Read the lines after the one in which a quote was opened and never closed as rows of their own.

    None if they do not look like rows: then they are a long cell that was cut off, and not documents. In a table of
    one column every line would look like a row, so the result is always None.
    """
    if num_columns < 2:
        return None
    good, num_bad, bad_bytes = [], 0, 0
    left = deque(lines)
    rows = csv.reader(_taken(left), delimiter=delimiter, strict=True)
    rest: list[bytes] = []
    while left:
        begun = len(left)
        try:
            row = next(rows)
        except csv.Error as error:
            if _is_never_closed(error):
                rest = list(lines[len(lines) - begun :])
                break
            num_bad, bad_bytes = num_bad + 1, bad_bytes + _length(lines, begun, len(left))
            continue
        if len(row) == num_columns:
            good.append(row)
        elif row:
            num_bad, bad_bytes = num_bad + 1, bad_bytes + _length(lines, begun, len(left))
    is_table = len(good) >= max(_ENOUGH_ROWS, _ENOUGH_SHARE * (len(good) + num_bad))
    return Rescued(good, num_bad, rest, bad_bytes) if is_table else None


def _length(lines: Sequence[bytes], num_left_before: int, num_left_after: int) -> int:
    return sum(map(len, lines[len(lines) - num_left_before : len(lines) - num_left_after]))


def _taken(left: deque[bytes]) -> Iterator[str]:
    while left:
        yield left.popleft().decode("utf-8", "surrogateescape")


def _is_never_closed(error: csv.Error) -> bool:
    return isinstance(error, EndlessRecord) or "unexpected end of data" in str(error) or "field larger" in str(error)


def _rows_or_damage(
    rows: Any, feed: LineFeed, delimiter: str, num_columns: int
) -> Iterator[list[str] | str | Rescued | DamagedBytes]:
    """Rows; for each row that cannot be read its reason instead; and damage, after which the rows of the next frame
    follow."""
    while True:
        feed.begin_record()
        try:
            yield next(rows)
        except StopIteration:
            return
        except DamagedBytes as damage:
            yield damage
        except EndlessLine:
            yield ENDLESS_LINE
        except csv.Error as error:
            if not _is_never_closed(error):
                yield BAD_ROW
                continue
            lines = feed.record or []
            rescued = rescue_rows(lines[1:], delimiter, num_columns)
            if rescued is None:
                feed.drain()
                yield NEVER_CLOSED
                return
            feed.record, feed.record_bytes = lines[:1], sum(map(len, lines[:1]))
            yield NEVER_CLOSED
            feed.give_back(rescued.rest)
            yield rescued

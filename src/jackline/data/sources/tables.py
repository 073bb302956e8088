"""Runs of records from tables: csv and parquet.

Owns: streaming one text column of a table; counting rows that cannot be read, by reason; places (a byte of the csv
file, a row of a parquet row group). Does not own which column it is (formats.py).
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jackline.data.sources.bytefile import ByteFile
from jackline.data.sources.decompress import START, At, Stream
from jackline.data.sources.frames import DamagedBytes
from jackline.data.sources.records import (
    MAX_RECORD_BYTES,
    NO_COLUMN,
    NOT_TEXT,
    NOT_UNICODE,
    RUN_BYTES,
    Records,
    is_valid,
)

BAD_ROW = "bad csv row"
NEVER_CLOSED = "csv quote never closed"
BAD_GROUP = "damaged parquet row group"
_BATCH_ROWS = 256
# If this many lines after a quote that never closes look like rows, they are rows and not the rest of a long cell.
_ENOUGH_ROWS, _ENOUGH_SHARE = 10, 0.95


class EndlessRecord(csv.Error):
    """The current record is longer than the limit."""


class LineFeed:
    """Lines of a stream for `csv.reader`; it counts the bytes that were read but not yet used.

    With `keeps_record` it also keeps the lines of the current record, so that they can be read again.
    """

    def __init__(self, stream: Stream, *, keeps_record: bool = False) -> None:
        self._stream = stream
        self._buffer = b""
        self._used = 0
        self._record_bytes = 0
        self.record: list[bytes] | None = [] if keeps_record else None

    def __iter__(self) -> LineFeed:
        return self

    def __next__(self) -> str:
        end = self._buffer.find(b"\n", self._used)
        while end < 0:
            if len(self._buffer) - self._used > MAX_RECORD_BYTES:
                raise DamagedBytes("csv line without end")
            more = self._stream.read(RUN_BYTES)
            if not more:
                break
            self._buffer, self._used = self._buffer[self._used :] + more, 0
            end = self._buffer.find(b"\n", self._used)
        end = len(self._buffer) if end < 0 else end + 1
        line = self._buffer[self._used : end]
        if not line:
            raise StopIteration
        if self.record is not None:
            self._record_bytes += len(line)
            if self.record and self._record_bytes > MAX_RECORD_BYTES:
                raise EndlessRecord  # the line stays unused
            self.record.append(line)
        self._used = end
        # Bytes that are not UTF-8 become lone surrogates, which only matter in the column that is used.
        return line.decode("utf-8", "surrogateescape")

    def begin_record(self) -> None:
        self.record, self._record_bytes = [], 0

    def give_back(self, lines: Sequence[bytes]) -> None:
        """Return these lines next."""
        self._buffer, self._used = b"".join(lines) + self._buffer[self._used :], 0

    @property
    def num_unused(self) -> int:
        return len(self._buffer) - self._used


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
        next(rows, None)
    index = header.index(column)
    records, num_bytes = Records([], START), 0
    damage: DamagedBytes | None = None
    for row in _rows_or_damage(rows, feed, delimiter, len(header)):
        if isinstance(row, DamagedBytes):
            damage = row
        elif isinstance(row, str):
            records.add_damage(row)
        elif isinstance(row, Rescued):
            _take_rescued(row, index, records)
            num_bytes = RUN_BYTES  # the run ends here, so that heavy damage is noticed soon
        elif row:
            num_bytes += _take_cell(row, index, records)
        if num_bytes >= RUN_BYTES:
            records.after, records.file_offset = stream.place(feed.num_unused), stream.file_offset
            yield records
            records, num_bytes = Records([], START), 0
    records.after, records.file_offset = stream.place(feed.num_unused), stream.file_offset
    yield records
    if damage is not None:
        raise damage


@dataclass(frozen=True)
class Rescued:
    """What follows a quote that never closes: whole rows, the number of lines that are not rows, and lines to be read
    again."""

    rows: list[list[str]]
    num_bad: int
    rest: list[bytes]


def rescue_rows(lines: Sequence[bytes], delimiter: str, num_columns: int) -> Rescued | None:
    """Read the lines after the one in which a quote was opened and never closed as rows of their own.

    None if they do not look like rows: then they are a long cell that was cut off, and not documents. In a table of
    one column every line would look like a row, so the result is always None.
    """
    if num_columns < 2:
        return None
    good, num_bad = [], 0
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
            num_bad += 1
            continue
        if len(row) == num_columns:
            good.append(row)
        elif row:
            num_bad += 1
    is_table = len(good) >= max(_ENOUGH_ROWS, _ENOUGH_SHARE * (len(good) + num_bad))
    return Rescued(good, num_bad, rest) if is_table else None


def _taken(left: deque[bytes]) -> Iterator[str]:
    while left:
        yield left.popleft().decode("utf-8", "surrogateescape")


def _is_never_closed(error: csv.Error) -> bool:
    return isinstance(error, EndlessRecord) or "unexpected end of data" in str(error) or "field larger" in str(error)


def _rows_or_damage(
    rows: Any, feed: LineFeed, delimiter: str, num_columns: int
) -> Iterator[list[str] | str | Rescued | DamagedBytes]:
    """Rows; for each row that cannot be read its reason instead; and last the damage that ends the file, if any."""
    while True:
        feed.begin_record()
        try:
            yield next(rows)
        except StopIteration:
            return
        except DamagedBytes as damage:
            yield damage
            return
        except csv.Error as error:
            if not _is_never_closed(error):
                yield BAD_ROW
                continue
            yield NEVER_CLOSED
            rescued = rescue_rows((feed.record or [])[1:], delimiter, num_columns)
            if rescued is None:
                return
            feed.give_back(rescued.rest)
            yield rescued


def _take_rescued(found: Rescued, index: int, records: Records) -> None:
    for row in found.rows:
        _take_cell(row, index, records)
    if found.num_bad:
        records.add_damage(BAD_ROW, found.num_bad)


def _take_cell(row: list[str], index: int, records: Records) -> int:
    if index >= len(row):
        records.add_damage(BAD_ROW)
        return 64
    try:
        text = row[index].encode("utf-8")
    except UnicodeEncodeError:
        records.add_damage(NOT_UNICODE)
        return 64
    records.texts.append(text)
    return sum(map(len, row)) + len(row)


class _Seekable(io.RawIOBase):
    """A ByteFile with the interface that pyarrow needs. Our own exceptions pass through pyarrow unchanged."""

    def __init__(self, file: ByteFile) -> None:
        self._file = file
        self._at = 0
        size = file.size()
        if size is None:
            raise DamagedBytes("parquet file of unknown length")
        self._size = size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        count = self._size - self._at if count < 0 else count
        data = self._file.read_at(self._at, count) if count else b""
        self._at += len(data)
        return data


def open_parquet(file: ByteFile) -> Any:
    """A pyarrow ParquetFile that reads pages, not whole column chunks."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(_Seekable(file), buffer_size=1 << 20, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise DamagedBytes("not a whole parquet file") from error


def parquet_records(file: ByteFile, column: str, at: At) -> Iterator[Records]:
    """Rows of one string column from row `at[1]` of row group `at[0]`."""
    table = open_parquet(file)
    if column not in table.schema_arrow.names:
        num_rows = max(1, table.metadata.num_rows)
        yield Records([], (table.num_row_groups, 0), {NO_COLUMN: num_rows})
        return
    for group in range(at[0], table.num_row_groups):
        yield from _group_records(table, column, group, at[1] if group == at[0] else 0)


def _group_records(table: Any, column: str, group: int, first_row: int) -> Iterator[Records]:
    import pyarrow

    num_rows = table.metadata.row_group(group).num_rows
    file_offset = _group_offset(table, group)
    row, records, num_bytes = 0, Records([], (group, first_row), file_offset=file_offset), 0
    try:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=[column]):
            values = _values(batch.column(0))
            for value in values[max(0, first_row - row) :]:
                num_bytes += _take_value(value, records)
            row += len(values)
            if num_bytes >= RUN_BYTES and row > first_row:
                records.after = (group, row)
                yield records
                records, num_bytes = Records([], (group, row), file_offset=file_offset), 0
    except (pyarrow.ArrowException, OSError):
        records.add_damage(BAD_GROUP, max(1, num_rows - max(row, first_row)))
    records.after = (group + 1, 0)
    yield records


def _values(column: Any) -> list[bytes | None] | list[Any]:
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        return [NOT_TEXT] * len(column)
    # As bytes: arrow does not check that a string column is UTF-8. Decoding happens once, below.
    values: list[Any] = column.cast(pyarrow.large_binary()).to_pylist()
    return values


def _take_value(value: Any, records: Records) -> int:
    if value is NOT_TEXT:
        records.add_damage(NOT_TEXT)
    elif value is None:
        records.texts.append(b"")
    elif not is_valid(value):
        records.add_damage(NOT_UNICODE)
    else:
        records.texts.append(value)
        return len(value)
    return 0


def _group_offset(table: Any, group: int) -> int:
    meta = table.metadata.row_group(group)
    return min(meta.column(index).data_page_offset for index in range(meta.num_columns)) if meta.num_columns else 0

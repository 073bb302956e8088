"""Runs of records from parquet files.

Owns: streaming one string column by pages, places (a row of a row group), and row groups that cannot be read.
Does not own which column it is (formats.py).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from jackline.data.sources.bytefile import ByteFile
from jackline.data.sources.damage import NOT_UNICODE, DamagedBytes
from jackline.data.sources.decompress import At
from jackline.data.sources.records import NO_COLUMN, NOT_TEXT, Records, is_valid
from jackline.data.sources.runs import RUN_BYTES

BAD_GROUP = "damaged parquet row group"
_BATCH_ROWS = 256


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
        records = Records([], (table.num_row_groups, 0))
        records.add_damage(NO_COLUMN, num_rows, num_bytes=file.size() or 1, place=(0, 0))
        records.add_seen(file.size() or 1)
        yield records
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
                records.add_seen(num_bytes)
                yield records
                records, num_bytes = Records([], (group, row), file_offset=file_offset), 0
    except (pyarrow.ArrowException, OSError):
        lost_rows = max(1, num_rows - max(row, first_row))
        lost_bytes = max(1, _column_bytes(table, column, group) * lost_rows // max(1, num_rows))
        records.add_damage(BAD_GROUP, lost_rows, num_bytes=lost_bytes, place=(file_offset, 0))
        num_bytes += lost_bytes
    records.add_seen(num_bytes)
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
        records.add_damage(NOT_TEXT, num_bytes=1)
        return 1
    if value is None:
        records.texts.append(b"")
        return 0
    if is_valid(value):
        records.texts.append(value)
    else:
        records.add_damage(NOT_UNICODE, num_bytes=len(value), place=(records.file_offset, 0))
    return len(value)


def _column_bytes(table: Any, column: str, group: int) -> int:
    """Uncompressed, by the file's own footer."""
    meta = table.metadata.row_group(group)
    columns = (meta.column(index) for index in range(meta.num_columns))
    return sum(int(item.total_uncompressed_size) for item in columns if item.path_in_schema == column)


def _group_offset(table: Any, group: int) -> int:
    meta = table.metadata.row_group(group)
    return min(meta.column(index).data_page_offset for index in range(meta.num_columns)) if meta.num_columns else 0

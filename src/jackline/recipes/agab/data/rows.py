"""Rows of a table of pairs, streamed: csv, tsv, jsonl and parquet, plain or compressed as the data engine reads them.

Owns: finding the four columns, and a row as four raw cells with the place a person looks at. Does not own what the
cells mean (pairs.py). A row that is no row is given out as the reason; bytes that cannot be read on are an error,
because training on the first half of a file is not what anybody asked for.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from jackline.data.sources.bytefile import ByteFile, Patience
from jackline.data.sources.damage import DamagedBytes
from jackline.data.sources.decompress import START, open_stream
from jackline.data.sources.formats import Layout, layout_of
from jackline.data.sources.listing import list_files, open_file
from jackline.data.sources.parquet import open_parquet
from jackline.data.sources.records import TOO_LONG
from jackline.data.sources.runs import MAX_RECORD_BYTES, whole_lines
from jackline.data.sources.tables import ENDLESS_LINE, EndlessLine, LineFeed
from jackline.errors import JacklineError, UsageError

ANTIBODY, ANTIGEN, PKD, KIND = "antibody_sequence", "antigen_sequence", "pKd", "affinity_type"
NEEDED = (ANTIBODY, ANTIGEN, PKD)
BAD_ROW = "unreadable row"
_BATCH_ROWS = 1024
_BATCH_CHARS = 1 << 20
_SHOWN_COLUMNS = 20
_KINDS_OF_TABLE = "it must be csv, tsv, jsonl or parquet (.gz and .zst too)"


class Row(NamedTuple):
    """Raw cells of one row. `pkd` is a number in parquet and jsonl, text in csv; None stands for an absent cell."""

    place: int  # the line of a text file, else the row, counted from 1
    antibody: Any
    antigen: Any
    pkd: Any
    kind: Any


class BadRow(NamedTuple):
    place: int


class TableFile(NamedTuple):
    """One file, and how far into it reading has come."""

    name: str
    size: int | None
    offset: int
    rows: list[Row | BadRow]


def read_tables(path: str) -> Iterator[TableFile]:
    """Runs of rows of every file of `path` (a file, folder, glob, http(s):// or hf://), in order."""
    num_files = 0
    for found in list_files(path, needs_known_ending=False):
        layout = layout_of(found.name)
        if layout is None or layout.container == "txt":
            raise UsageError(
                f"{found.name} is not a table of pairs",
                hint=_KINDS_OF_TABLE,
            )
        num_files += 1
        file = open_file(found.name, Patience())
        try:
            yield from _read_file(file, layout)
        finally:
            file.close()
    if not num_files:
        raise UsageError(f"there is no table in {path}", hint=_KINDS_OF_TABLE)


def _read_file(file: ByteFile, layout: Layout) -> Iterator[TableFile]:
    readers = {"csv": _csv_rows, "tsv": _csv_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}
    last = 0
    try:
        for rows, offset in readers[layout.container](file, layout):
            last = rows[-1].place if rows else last
            yield TableFile(file.name, file.size(), offset, rows)
            file.check_same()
    except DamagedBytes as damage:
        raise JacklineError(
            f"{file.name} cannot be read on after {place_word(layout)} {last}: {damage}",
            hint="the file is damaged; fetch or export it again (a part of the data is never used silently)",
        ) from damage


def place_word(layout: Layout | None) -> str:
    return "row" if layout is not None and layout.container == "parquet" else "line"


def _csv_rows(file: ByteFile, layout: Layout) -> Iterator[tuple[list[Row | BadRow], int]]:
    csv.field_size_limit(MAX_RECORD_BYTES)
    stream = open_stream(file, layout.compression, START)
    reader = csv.reader(LineFeed(stream), delimiter="\t" if layout.container == "tsv" else ",", strict=True)
    try:
        header = [name.removeprefix("\ufeff").strip() for name in next(reader, [])]
    except csv.Error as error:
        raise DamagedBytes(f"bad header ({error})") from error
    places = _find_columns(header, file.name)
    rows: list[Row | BadRow] = []
    num_chars = 0
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except DamagedBytes:
            yield rows, stream.file_offset
            raise
        except EndlessLine as error:
            yield rows, stream.file_offset
            raise DamagedBytes(ENDLESS_LINE) from error
        except csv.Error as error:
            if "unexpected end of data" in str(error) or "field larger" in str(error):
                yield rows, stream.file_offset
                raise DamagedBytes(f"a quote that opens at line {line} is never closed") from error
            rows.append(BadRow(line))
            continue
        if not cells:
            continue
        rows.append(_row(cells, places, line))
        num_chars += sum(map(len, cells))
        if len(rows) >= _BATCH_ROWS or num_chars >= _BATCH_CHARS:
            yield rows, stream.file_offset
            rows, num_chars = [], 0
    yield rows, stream.file_offset


def _row(cells: list[str], places: list[int | None], line: int) -> Row | BadRow:
    try:
        antibody, antigen, pkd, kind = (None if place is None else cells[place] for place in places)
    except IndexError:
        return BadRow(line)
    return Row(line, antibody, antigen, pkd, kind)


def _jsonl_rows(file: ByteFile, layout: Layout) -> Iterator[tuple[list[Row | BadRow], int]]:
    stream = open_stream(file, layout.compression, START)
    names: list[str] | None = None
    line = 0
    for run in whole_lines(stream):
        if run.damage is not None:
            raise run.damage
        if run.num_skipped:
            raise DamagedBytes(TOO_LONG)
        rows: list[Row | BadRow] = []
        texts = run.data.split(b"\n")
        for text in texts[:-1] if texts[-1] == b"" else texts:
            line += 1
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                rows.append(BadRow(line))
                continue
            if names is None:
                header = list(record)
                names = [header[at] if at is not None else KIND for at in _find_columns(header, file.name)]
            rows.append(Row(line, *(record.get(name) for name in names)))
        yield rows, stream.file_offset


def _parquet_rows(file: ByteFile, layout: Layout) -> Iterator[tuple[list[Row | BadRow], int]]:
    import pyarrow

    table = open_parquet(file)
    header = list(table.schema_arrow.names)
    places = _find_columns(header, file.name)
    columns = [header[at] for at in places if at is not None]
    done, size, total = 0, file.size() or 0, max(1, table.metadata.num_rows)
    try:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS // 4, columns=columns):
            cells = [batch.column(name).to_pylist() for name in columns]
            cells += [[None] * batch.num_rows] * (4 - len(cells))
            rows: list[Row | BadRow] = [Row(done + at + 1, *row) for at, row in enumerate(zip(*cells, strict=True))]
            done += batch.num_rows
            yield rows, size * done // total
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DamagedBytes("damaged parquet row group") from error


def _find_columns(header: list[str], name: str) -> list[int | None]:
    """Places of the four columns; the last may be absent. Upper and lower case differ only where both are there."""
    lower = [column.lower() for column in header]
    places: list[int | None] = []
    for wanted in (*NEEDED, KIND):
        if wanted in header:
            places.append(header.index(wanted))
        else:
            places.append(lower.index(wanted.lower()) if wanted.lower() in lower else None)
    missing = [wanted for wanted, place in zip(NEEDED, places[:3], strict=True) if place is None]
    if missing:
        shown = ", ".join(repr(column[:40])[1:-1] for column in header[:_SHOWN_COLUMNS])
        more = f" and {len(header) - _SHOWN_COLUMNS} more" if len(header) > _SHOWN_COLUMNS else ""
        raise UsageError(
            f"{name} has no column {' and no column '.join(missing)}",
            detail=f"its columns are: {shown}{more}" if shown else "it has no columns at all",
            hint=f"a table of pairs has {ANTIBODY} (heavy|light), {ANTIGEN}, {PKD} and perhaps {KIND}",
        )
    return places

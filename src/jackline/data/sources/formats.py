"""Which reader a file needs, and which of its columns is the text.

Owns: names of formats, finding the format from a file's name, one entry point to all readers (`read_records`), and
finding the text column. Does not own the readers (records.py, tables.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jackline.data.sources.bytefile import ByteFile
from jackline.data.sources.decompress import START, At, Stream, open_stream
from jackline.data.sources.encoding import DecodingStream
from jackline.data.sources.parquet import open_parquet, parquet_records
from jackline.data.sources.records import (
    NO_COLUMN,
    WHOLE,
    Pieces,
    Records,
    block_records,
    jsonl_records,
    line_records,
    whole_file_records,
)
from jackline.data.sources.runs import arriving_lines
from jackline.data.sources.sections import section_cut
from jackline.data.sources.tables import csv_header, csv_records
from jackline.errors import UsageError

Container = Literal["txt", "jsonl", "csv", "tsv", "parquet"]
Documents = Literal["file", "line", "block"]
CONTAINERS: dict[str, Container] = {
    "txt": "txt",
    "text": "txt",
    "md": "txt",
    "rst": "txt",
    "py": "txt",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "csv": "csv",
    "tsv": "tsv",
    "parquet": "parquet",
    "pq": "parquet",
}
COMPRESSIONS = {"gz": "gz", "zst": "zst", "zstd": "zst"}
# In the order of preference, for when the user did not name the text column of a table.
TEXT_COLUMNS = ("text", "content", "raw_content", "document", "body", "article", "passage", "sentence", "markdown")


@dataclass(frozen=True)
class Layout:
    """How to read one file."""

    container: Container
    compression: str = ""
    documents: Documents = "file"
    column: str = ""
    encoding: str = ""  # as Python calls it; "": UTF-8
    section_bytes: int = 0  # of a file that is one document but is divided between the splits; 0: it is not

    @property
    def has_columns(self) -> bool:
        return self.container != "txt"

    @property
    def is_packed(self) -> bool:
        """Whether bytes of the file are not bytes of text."""
        return bool(self.compression) or self.container == "parquet"

    @property
    def is_plain_text(self) -> bool:
        return self.container == "txt" and not self.compression


def layout_of(name: str, container: str = "auto", documents: Documents = "file", column: str = "") -> Layout | None:
    """The layout that a file's name or the given container implies; None if neither is known."""
    words = name.rsplit("/", 1)[-1].split("?")[0].lower().split(".")
    compression = COMPRESSIONS.get(words[-1], "") if len(words) > 1 else ""
    ending = words[-2] if compression and len(words) > 2 else words[-1]
    found = CONTAINERS.get(ending) if len(words) > 1 and container == "auto" else CONTAINERS.get(container)
    return None if found is None else Layout(found, compression, documents, column)


def read_records(file: ByteFile, layout: Layout, at: At = START, *, is_live: bool = False) -> Iterator[Records]:
    """Runs of records from `at` on. Raises DamagedBytes where nothing of the file can be read.

    `is_live`: a line of jsonl is returned as soon as it has arrived, as a run of its own.
    """
    if layout.container == "parquet":
        return parquet_records(file, layout.column, at)
    stream = open_text(file, layout, at)
    if layout.container == "jsonl":
        return jsonl_records(stream, layout.column, is_live=is_live)
    if layout.container in ("csv", "tsv"):
        return _csv(file, layout, stream)
    if layout.documents == "file":
        size = layout.section_bytes
        return whole_file_records(stream, Pieces(size, section_cut, are_sections=True) if size else WHOLE)
    return line_records(stream) if layout.documents == "line" else block_records(stream)


def open_text(file: ByteFile, layout: Layout, at: At) -> Stream:
    """The file's text as UTF-8 from `at` on."""
    stream = open_stream(file, layout.compression, at)
    return DecodingStream(stream, layout.encoding) if layout.encoding else stream


def _csv(file: ByteFile, layout: Layout, stream: Stream) -> Iterator[Records]:
    header = _csv_names(file, layout)
    if layout.column not in header:
        records = Records([], stream.place(0))
        records.add_damage(NO_COLUMN, num_bytes=file.size() or 1, place=START)
        records.add_seen(file.size() or 1)
        yield records
        return
    yield from csv_records(stream, header, layout.column, _delimiter(layout))


def _delimiter(layout: Layout) -> str:
    return "\t" if layout.container == "tsv" else ","


def _csv_names(file: ByteFile, layout: Layout) -> list[str]:
    return csv_header(open_text(file, layout, START), _delimiter(layout))


def string_columns(file: ByteFile, layout: Layout) -> list[str]:
    """Names of the columns that may hold the text, from the beginning of the file; empty if it has no record."""
    if layout.container == "parquet":
        schema = open_parquet(file).schema_arrow
        return [field.name for field in schema if "string" in str(field.type)]
    if layout.container in ("csv", "tsv"):
        return _csv_names(file, layout)
    for run in arriving_lines(open_text(file, layout, START)):
        for line in run.data.split(b"\n"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                return [name for name, value in record.items() if isinstance(value, str)]
    return []


def choose_text_column(names: list[str], wanted: str | None, file_name: str) -> str:
    """The column asked for, else a well-known name, else the only one there is."""
    if wanted is not None:
        if wanted in names:
            return wanted
        raise UsageError(
            f"{file_name} has no text column '{wanted}'", hint=f"its text columns are: {', '.join(names) or 'none'}"
        )
    for name in TEXT_COLUMNS:
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    raise UsageError(
        f"cannot tell which column of {file_name} is the text: {', '.join(names) or 'it has no text column'}",
        hint="name it: text_column=NAME (on the command line --text-column NAME)",
    )


__all__ = ["Layout", "choose_text_column", "layout_of", "read_records", "string_columns"]

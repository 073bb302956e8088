"""Append-only files stay readable whatever instant a writer dies at."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.rundir.jsonl import JsonlWriter, end_of, read_last, read_lines

VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
RECORDS = st.lists(st.dictionaries(st.text(max_size=8), VALUES, max_size=4), max_size=8)

SHORT_RECORD = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=9), max_size=2)


def write_all(path: Path, records: list[dict[str, Any]]) -> None:
    writer = JsonlWriter(path)
    assert all(writer.append(record) for record in records)
    writer.close()


@given(RECORDS)
def test_what_is_appended_is_read_back(records: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        write_all(path, records)
        lines = read_lines(path)
        assert (list(lines.records), lines.next_offset, lines.num_damaged) == (records, path.stat().st_size, 0)


@given(st.lists(SHORT_RECORD, min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_a_file_cut_at_any_byte_is_read_up_to_its_last_whole_line_healed_and_gone_on(
    records: list[dict[str, Any]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        write_all(path, records)
        whole = path.read_bytes()
        ends = [index + 1 for index, byte in enumerate(whole) if byte == 0x0A]
        for size in range(len(whole) + 1):
            path.write_bytes(whole[:size])
            num_whole = sum(end <= size for end in ends)
            lines = read_lines(path)
            assert list(lines.records) == records[:num_whole]
            assert lines.next_offset == (ends[num_whole - 1] if num_whole else 0)
            write_all(path, [{"after": "the cut"}])
            again = read_lines(path)
            assert list(again.records) == [*records[:num_whole], {"after": "the cut"}]
            assert again.num_damaged == 0


@given(RECORDS, st.lists(st.integers(1, 40), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_a_reader_of_a_growing_file_gets_each_record_once_and_never_a_part(
    records: list[dict[str, Any]], portions: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        write_all(path, records)
        whole = path.read_bytes()
        path.write_bytes(b"")
        got: list[dict[str, Any]] = []
        offset = at = turn = 0
        while at < len(whole):
            portion = whole[at : at + portions[turn % len(portions)]]
            with open(path, "ab") as file:
                file.write(portion)
            at, turn = at + len(portion), turn + 1
            lines = read_lines(path, offset)
            got += lines.records
            offset = lines.next_offset
        assert got == records


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        path.write_bytes(data)
        lines = read_lines(path)
        assert lines.next_offset == data.rfind(b"\n") + 1
        write_all(path, [{"x": 1}])
        assert read_lines(path).records[-1] == {"x": 1}


def test_an_absent_file_has_no_records(tmp_path: Path) -> None:
    lines = read_lines(tmp_path / "none.jsonl", 7)
    assert (lines.records, lines.next_offset) == ((), 7)


def test_a_line_that_is_not_json_is_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a":1}\nnot json\n[1]\n{"b":2}\n')
    lines = read_lines(path)
    assert (lines.records, lines.num_damaged) == (({"a": 1}, {"b": 2}), 2)


def test_a_monstrous_line_does_not_stop_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * 5000 + b'\n{"a":1}\n')
    offset, records = 0, []
    while (lines := read_lines(path, offset, max_bytes=1000)).next_offset > offset:
        offset = lines.next_offset
        records += lines.records
    assert (offset, records) == (path.stat().st_size, [{"a": 1}])


@pytest.mark.parametrize("count", [1, 10, 5000])
def test_the_last_records_are_found_from_the_end(tmp_path: Path, count: int) -> None:
    path = tmp_path / "events.jsonl"
    write_all(path, [{"number": number, "text": "x" * 50} for number in range(3000)])
    numbers = [record["number"] for record in read_last(path, count)]
    assert numbers == list(range(3000))[-count:]


def test_a_disk_that_takes_only_part_of_a_line_leaves_no_part(tmp_path: Path) -> None:
    """A file size limit is a full disk that needs no disk."""
    import resource
    import signal

    path = tmp_path / "events.jsonl"
    writer = JsonlWriter(path)
    assert writer.append({"first": 1})
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        assert not writer.append({"second": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, former)
    assert path.stat().st_size == size
    assert writer.append({"third": 3})
    writer.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"first": 1}, {"third": 3}]
    assert path.stat().st_size == read_lines(path).next_offset


@pytest.mark.parametrize(
    ("text", "offset"),
    [(b"", 0), (b'{"a": 1}\n', 9), (b'{"a": 1}\n{"b"', 9), (b'{"b"', 0), (b"x" * (3 << 20), 3 << 20)],
    ids=["empty", "whole", "torn", "one torn line", "a line without end"],
)
def test_a_reader_of_what_comes_begins_behind_the_last_whole_line(text: bytes, offset: int, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(text)
    assert end_of(tmp_path / "lines") == offset
    assert end_of(tmp_path / "none") == 0

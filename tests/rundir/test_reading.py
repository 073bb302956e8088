"""Reading a file of a run, whatever somebody put in its place."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from jackline.rundir.access import reading
from jackline.rundir.access.reading import open_plain, parse_json, read_end, read_json, read_part, read_whole
from jackline.rundir.jsonl import read_lines


def put(path: Path, what: str) -> None:
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        path.symlink_to(what)


@pytest.mark.parametrize("what", ["fifo", "folder", "socket", "/dev/zero", "/dev/tty", "/etc/passwd", "run.json"])
def test_only_a_plain_file_is_read_and_nothing_is_waited_for(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run.json"
    put(path, what)
    with pytest.raises(OSError):
        open_plain(path)
    assert read_json(path) is None
    assert read_lines(path).records == ()


def test_a_file_of_ten_gigabytes_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.json"
    with open(path, "wb") as file:
        file.truncate(10 << 30)
    assert read_json(path) is None
    with pytest.raises(OSError, match="larger than"):
        read_whole(path)
    data, is_cut = read_end(path, 100)
    assert (len(data), is_cut) == (100, True)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 60 + b"]" * 60,
        b"[" + b"{}," * 600_000 + b"{}]",
        b"9" * 5000,
        b"{",
        b"",
        b"\xff\xfe",
    ],
)
def test_what_is_too_deep_too_much_or_no_json_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        parse_json(data)
    path = tmp_path / "state.json"
    path.write_bytes(data)
    assert read_json(path) is None


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400, "-9223372036854775808"])
def test_a_number_beyond_all_sense_is_unknown(text: str) -> None:
    assert parse_json(f'{{"at_s": {text}, "list": [{text}, 1]}}'.encode()) == {"at_s": None, "list": [None, 1]}


def test_ordinary_values_stay_as_they_are() -> None:
    text = '{"c": "x", "d": [true, null], "e": 0.3333333333333333, "f": 1.7e-05, "g": 461168601842738}'
    assert parse_json(text.encode()) == {
        "c": "x",
        "d": [True, None],
        "e": 0.3333333333333333,
        "f": 1.7e-05,
        "g": 461168601842738,
    }


def test_parts_are_read_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_bytes(b"0123456789")
    assert read_part(path, 3, 4) == b"3456"
    assert read_part(path, 30, 4) == b""
    assert read_end(path, 4) == (b"6789", True)
    assert read_end(path, 40) == (b"0123456789", False)
    assert reading.read_text(path, 3) == "012"

"""Files that are whole or absent."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.rundir.atomic import drop_spares, keep_spares, read_json, write_json, write_whole
from tests.deadline import HANGS_S


def test_a_file_is_replaced_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, b"old")
    write_whole(path, b"new", durable=True)
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.mkdir()
    (path / "inside").touch()
    with pytest.raises(OSError):
        write_whole(path, b"new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    from tests.places import Unavailable, small_disk

    (tmp_path / "disk").mkdir()
    try:
        with small_disk(tmp_path / "disk", "1M") as disk:
            path = disk / "state.json"
            write_whole(path, b"old")
            with pytest.raises(OSError, match="No space left on device"):
                write_whole(path, bytes(2 << 20))
            assert path.read_bytes() == b"old"
            assert [entry.name for entry in disk.iterdir()] == ["state.json"]
    except Unavailable as reason:
        pytest.skip(str(reason))


WRITER = """
import sys
from pathlib import Path
from jackline.rundir.atomic import write_json
number = 0
while True:
    number += 1
    write_json(Path(sys.argv[1]), {"number": number, "filling": [number] * 2000})
"""


def test_a_reader_never_sees_a_mixture_even_when_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        seen: set[int] = set()
        deadline_s = time.monotonic() + HANGS_S
        while len(seen) < 30 and time.monotonic() < deadline_s:
            if path.exists():
                value = json.loads(path.read_bytes())
                assert set(value["filling"]) == {value["number"]}
                seen.add(value["number"])
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) >= 30
    value = json.loads(path.read_bytes())
    assert set(value["filling"]) == {value["number"]}


def test_json_keeps_names_that_are_not_utf8_and_words_that_are(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    value = {"path": os.fsdecode(b"/data/\xff\xfe"), "word": "größer", "at": Path("/x")}
    write_json(path, value)
    assert read_json(path) == {**value, "at": "/x"}
    assert "größer".encode() in path.read_bytes()


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"loss": math.nan, "rates": [1.5, math.inf, (-math.inf,)], "more": {"x": 2}})
    assert read_json(path) == {"loss": None, "rates": [1.5, None, [None]], "more": {"x": 2}}
    assert b"NaN" not in path.read_bytes()


def test_half_a_character_does_not_cost_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"line": "broken \ud83d end"})
    assert read_json(path) == {"line": "broken \ud83d end"}


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": 1} tail', b"\x00\xff", b"[" * 100_000])
def test_what_is_not_json_is_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(data)
    assert read_json(path) is None


def test_an_absent_file_is_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "state.json") is None
    assert read_json(tmp_path) is None


def test_a_full_disk_takes_new_versions_of_a_file_with_spares_again_and_again(tmp_path: Path) -> None:
    from tests.places import Unavailable, fill_bytes, fill_inodes, small_disk

    (tmp_path / "disk").mkdir()
    try:
        with small_disk(tmp_path / "disk", "1M", inodes=50) as disk:
            path = disk / "state.json"
            write_json(path, {"number": 0})
            assert keep_spares(path, 8192, count=2)
            assert keep_spares(disk / "once.json", 8192)
            fill_bytes(disk)
            fill_inodes(disk)
            for number in range(1, 6):
                write_json(path, {"number": number, "filling": "x" * 100 * number}, durable=True)
                assert read_json(path)["number"] == number
            write_json(disk / "once.json", {"end": 75})
            assert read_json(disk / "once.json") == {"end": 75}
            with pytest.raises(OSError, match="No space left on device"):
                write_whole(path, bytes(9000))
            assert read_json(path)["number"] == 5
            drop_spares(path)
            assert not list(disk.glob(".state.json.spare*"))
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_without_room_for_spares_none_is_left_half_made(tmp_path: Path) -> None:
    from tests.places import Unavailable, fill_bytes, small_disk

    (tmp_path / "disk").mkdir()
    try:
        with small_disk(tmp_path / "disk", "1M") as disk:
            fill_bytes(disk)
            assert not keep_spares(disk / "state.json", 8192)
            assert [entry.name for entry in disk.iterdir()] == ["ballast"]
    except Unavailable as reason:
        pytest.skip(str(reason))

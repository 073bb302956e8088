"""Copies of a stranger's good checkpoint: real files, bounded, never in the way."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from jackline.rundir.layout import RunDir
from jackline.supervisor.foreign.fingerprint import WHOLE_UP_TO_BYTES, fingerprint
from jackline.supervisor.foreign.kept import NotKept, drop_old, keep_copy, put_back

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    return run


def keep(run: RunDir, source: Path, number: int = 1) -> Path:
    return keep_copy(run, source, fingerprint(source), number, tell=lambda text: None).path


def test_a_copy_has_the_content_and_time_and_survives_rewriting_in_place(run: RunDir, tmp_path: Path) -> None:
    source = tmp_path / "last.pt"
    source.write_bytes(b"good" * 1000)
    os.utime(source, ns=(5_000_000_001, 7_000_000_003))
    before = fingerprint(source)
    copy = keep(run, source)
    with open(source, "wb") as file:  # the same inode: a hard link would be gone too
        file.write(b"to")
    assert fingerprint(copy).is_same(before)
    assert copy == run.path / "kept" / "0001" / "last.pt"


def test_a_folder_is_copied_with_everything_in_it(run: RunDir, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-5"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a").write_bytes(b"a")
    (source / "b").write_bytes(b"b")
    copy = keep(run, source)
    assert fingerprint(copy).is_same(fingerprint(source))
    (source / "deep" / "a").write_bytes(b"c")
    assert not fingerprint(copy).has_content_of(fingerprint(source))


def test_a_source_that_changes_meanwhile_is_not_kept(run: RunDir, tmp_path: Path) -> None:
    source = tmp_path / "last.pt"
    source.write_bytes(b"one")
    before = fingerprint(source)
    source.write_bytes(b"two")
    with pytest.raises(NotKept, match="changed while it was copied"):
        keep_copy(run, source, before, 1, tell=lambda text: None)
    assert list(run.kept.iterdir()) == []


def test_a_copy_takes_at_most_a_quarter_of_the_free_space(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9000, 5001, 3999))
    source = tmp_path / "last.pt"
    source.write_bytes(bytes(1000))
    with pytest.raises(NotKept) as caught:
        keep(run, source)
    assert str(caught.value) == (
        f"a copy of {source} would take 1000 B of 3.9 KiB that are free; at most a quarter is used for that"
    )
    assert list(run.kept.iterdir()) == []


def test_two_copies_stay_and_the_one_in_use(run: RunDir, tmp_path: Path) -> None:
    source = tmp_path / "last.pt"
    for number in range(1, 5):
        source.write_text(str(number))
        keep(run, source, number)
    drop_old(run, run.kept / "0001" / "last.pt")
    assert sorted(path.name for path in run.kept.iterdir()) == ["0001", "0003", "0004"]
    drop_old(run, None)
    assert sorted(path.name for path in run.kept.iterdir()) == ["0003", "0004"]


def test_what_stands_where_a_copy_is_put_back_is_set_aside(run: RunDir, tmp_path: Path) -> None:
    source = tmp_path / "last.pt"
    source.write_bytes(b"good")
    copy = keep(run, source)
    for number in (1, 2):
        source.write_bytes(f"torn {number}".encode())
        aside = put_back(copy, source)
        assert source.read_bytes() == b"good"
        assert aside == tmp_path / f".last.pt.set-aside-{number}"
        assert aside.read_bytes() == f"torn {number}".encode()
    source.unlink()
    assert put_back(copy, source) is None


def test_a_large_file_is_known_by_its_ends_and_samples_and_its_time(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    with open(path, "wb") as file:
        file.truncate(WHOLE_UP_TO_BYTES * 4)
    before = fingerprint(path)
    with open(path, "r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"x")
    assert before.digest.startswith("parts:")
    assert fingerprint(path).digest != before.digest

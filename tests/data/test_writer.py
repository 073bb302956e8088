"""Filling an era: the newest truthful commit is found again, whatever happened after it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jackline.data.cache.directory import EraRecord, Ledger, era_path, part_path
from jackline.data.cache.state import Cursor, begin
from jackline.data.cache.writer import EraWriter, clear_commits, finish_interrupted_seals, hash_file
from jackline.data.sources.bytefile import SourceChanged

DTYPE = np.dtype("<u2")
TOKENS = np.arange(1000, dtype=DTYPE)


def cursor(skip: int) -> Cursor:
    return Cursor(begin(1), skip)


def writer_with_commits(folder: Path, *ends: int) -> None:
    writer = EraWriter(folder, 3, 1000, DTYPE)
    at = 0
    for end in ends:
        writer.append(TOKENS[at:end])
        assert writer.commit(cursor(end))
        writer._running.result()  # type: ignore[union-attr]
        at = end
    writer.append(TOKENS[at : at + 57])  # never committed
    writer.close()


def recover(folder: Path) -> tuple[int, Cursor | None]:
    writer = EraWriter(folder, 3, 1000, DTYPE)
    found = writer.recover()
    writer.close()
    assert part_path(folder, 3).stat().st_size == writer.num_tokens * 2
    return writer.num_tokens, found


def test_a_new_era_begins_empty(tmp_path: Path) -> None:
    assert recover(tmp_path) == (0, None)


def test_what_was_committed_is_kept_and_the_rest_cut_off(tmp_path: Path) -> None:
    writer_with_commits(tmp_path, 100, 250, 300)
    assert recover(tmp_path) == (300, cursor(300))


def test_a_damaged_tail_falls_back_to_the_commit_before(tmp_path: Path) -> None:
    writer_with_commits(tmp_path, 100, 250, 300)
    with open(part_path(tmp_path, 3), "r+b") as file:
        file.seek(2 * 280)
        file.write(b"\xff\xff")
    assert recover(tmp_path) == (250, cursor(250))


def test_a_part_shorter_than_its_commits_falls_back(tmp_path: Path) -> None:
    writer_with_commits(tmp_path, 100, 250, 300)
    with open(part_path(tmp_path, 3), "r+b") as file:
        file.truncate(2 * 120)
    assert recover(tmp_path) == (100, cursor(100))


def test_a_torn_commit_line_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    writer_with_commits(tmp_path, 100, 250)
    with open(tmp_path / "open.jsonl", "ab") as file:
        file.write(b'{"era":3,"tokens":300,"ha')
    assert recover(tmp_path) == (250, cursor(250))


def test_commits_of_another_era_are_not_taken(tmp_path: Path) -> None:
    writer_with_commits(tmp_path, 100)
    writer = EraWriter(tmp_path, 4, 1000, DTYPE)
    assert writer.recover() is None
    writer.close()


def test_continuing_after_recovery_gives_the_same_era_as_without_it(tmp_path: Path) -> None:
    for name, is_interrupted in (("whole", False), ("interrupted", True)):
        folder = tmp_path / name
        folder.mkdir()
        if is_interrupted:
            writer_with_commits(folder, 100, 250)
        writer = EraWriter(folder, 3, 1000, DTYPE)
        writer.recover()
        writer.append(TOKENS[writer.num_tokens :])
        writer.seal(cursor(0), is_last=False, expected=None)
    one, other = (Ledger(tmp_path / name) for name in ("whole", "interrupted"))
    one.refresh()
    other.refresh()
    assert one.records == other.records
    assert one.records[3].hash == hash_file(era_path(tmp_path / "interrupted", 3))
    assert np.array_equal(np.fromfile(era_path(tmp_path / "interrupted", 3), DTYPE), TOKENS)


def test_an_era_built_again_must_be_what_the_ledger_says(tmp_path: Path) -> None:
    writer = EraWriter(tmp_path, 3, 1000, DTYPE)
    writer.append(TOKENS)
    record = writer.seal(cursor(0), is_last=False, expected=None)
    era_path(tmp_path, 3).unlink()
    again = EraWriter(tmp_path, 3, 1000, DTYPE)
    again.append(TOKENS)
    assert again.seal(cursor(0), is_last=False, expected=record) == record
    assert era_path(tmp_path, 3).exists()
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 1
    other = EraWriter(tmp_path, 3, 1000, DTYPE)
    other.append(TOKENS[::-1])
    with pytest.raises(SourceChanged, match="era 3 was built again and came out different: 1,000 tokens"):
        other.seal(cursor(0), is_last=False, expected=record)
    assert not part_path(tmp_path, 3).exists()


def test_a_death_between_ledger_and_renaming_is_finished_at_the_next_start(tmp_path: Path) -> None:
    writer = EraWriter(tmp_path, 3, 1000, DTYPE)
    writer.append(TOKENS)
    record = writer.seal(cursor(0), is_last=False, expected=None)
    era_path(tmp_path, 3).rename(part_path(tmp_path, 3))
    part_path(tmp_path, 4).write_bytes(b"the open era stays")
    finish_interrupted_seals(tmp_path, {3: record})
    assert hash_file(era_path(tmp_path, 3)) == record.hash
    assert part_path(tmp_path, 4).exists()


def test_what_is_left_of_a_rebuild_is_removed(tmp_path: Path) -> None:
    record = EraRecord(3, 1000, "0" * 32, cursor(0).to_json())
    part_path(tmp_path, 3).write_bytes(b"half")
    finish_interrupted_seals(tmp_path, {3: record})
    assert not list(tmp_path.glob("era-*"))


def test_an_empty_last_era_has_a_record_and_no_file(tmp_path: Path) -> None:
    writer = EraWriter(tmp_path, 3, 1000, DTYPE)
    writer.seal(cursor(0), is_last=True, expected=None)
    ledger = Ledger(tmp_path)
    ledger.refresh()
    assert ledger.last_era == 3
    assert not list(tmp_path.glob("era-*"))


def test_a_ledger_line_is_readable_json(tmp_path: Path) -> None:
    writer = EraWriter(tmp_path, 0, 1000, DTYPE)
    writer.append(TOKENS)
    writer.seal(cursor(5), is_last=True, expected=None)
    clear_commits(tmp_path)
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "era": 0,
        "tokens": 1000,
        "hash": hash_file(era_path(tmp_path, 0)),
        "ends_at": {
            "sources": [[None, [0, 0], "", False, 0, 0, 0, 0, 0, ""]],
            "counts": [0, 0, 0, 0, 0],
            "damaged": {},
            "lost": {
                "seen_bytes": 0,
                "text_bytes": 0,
                "file_bytes": 0,
                "suspect_bytes": 0,
                "records": 0,
                "places": [],
            },
            "encodings": {},
            "skip_tokens": 5,
            "documents": 0,
        },
        "is_last": True,
    }

"""One checkpoint of several ranks: all parts or none, whoever is killed, and never a part of another save."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackline.checkpoint.format.catalogue import LOCK, list_names
from jackline.checkpoint.format.hashing import best_algorithm
from jackline.checkpoint.format.header import build_header, lay_out
from jackline.checkpoint.format.manifest import STATE, Manifest, Name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.writer import parts
from jackline.checkpoint.writer.commit import Draft
from jackline.checkpoint.writer.disk import Disk
from jackline.checkpoint.writer.lock import WriterLock
from jackline.rundir.process_id import identify

TOKEN = "abc"


def write(
    folder: Path, step: int, file: str, value: bytes, join: Callable[[Draft], Any] = lambda draft: [], **facts: Any
) -> Path:
    """A checkpoint, or a part of one, with a file of one tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    disk = Disk()
    draft = Draft(folder, Name(step), best_algorithm(), disk)
    try:
        placed = lay_out([("w", "U8", (len(value),))])
        entries = [draft.add_small(file, build_header(placed) + value)]
        entries += join(draft)
        entries.append(draft.add_small(STATE, b"{}"))
        return draft.commit(Manifest(step, 1.0, draft.algorithm, tuple(entries), facts=facts))
    except BaseException:
        draft.discard()
        raise


def write_part(folder: Path, rank: int, step: int, number: int) -> Path:
    place = parts.part_folder(folder, TOKEN, rank)
    return write(place, step, f"model.rank-{rank}.safetensors", bytes([rank] * 9), save=number)


def write_joined(folder: Path, step: int, number: int, size: int = 3) -> Path:
    team = {"token": TOKEN, "rank": 0, "size": size, "number": number}
    join = lambda draft: parts.join_parts(draft, team, Disk(), itertools.count().__next__)  # noqa: E731
    return write(folder, step, "model.rank-0.safetensors", b"0" * 9, join)


def ended_process() -> Any:
    """A process that has ended, by its pid and start time."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = identify(process.pid)
        assert process.stdin is not None
        process.stdin.close()
    return found


def note_ended(folder: Path, rank: int) -> None:
    """The lock of a writer that has ended, as well as its rank."""
    place = parts.part_folder(folder, TOKEN, rank)
    place.mkdir(parents=True, exist_ok=True)
    gone = ended_process()
    lock = WriterLock(place / LOCK, gone)
    lock.acquire(lambda holder: None)
    lock.release()
    text = (place / LOCK).read_text()
    me = identify(os.getpid())
    assert me is not None and gone is not None
    (place / LOCK).write_text(text.replace(f'"pid": {me.pid}', f'"pid": {gone.pid}'))


def test_the_parts_become_one_whole_checkpoint(tmp_path: Path) -> None:
    for rank in (1, 2):
        write_part(tmp_path, rank, 7, number=4)
    place = write_joined(tmp_path, 7, 4)
    files = [entry.name for entry in verify_checkpoint(place).files]
    assert sorted(files) == [*(f"model.rank-{rank}.safetensors" for rank in range(3)), STATE]
    assert not list(tmp_path.glob(f"{parts.PARTS}*/*/step-*"))


def test_a_rank_that_has_ended_leaves_the_checkpoint_before_it_whole(tmp_path: Path) -> None:
    for rank in (1, 2):
        write_part(tmp_path, rank, 7, number=4)
    write_joined(tmp_path, 7, 4)
    write_part(tmp_path, 1, 9, number=5)
    note_ended(tmp_path, 2)
    with pytest.raises(parts.PartLost, match="rank 2 ended before its part was written"):
        write_joined(tmp_path, 9, 5)
    assert list_names(tmp_path) == [Name(7)]
    verify_checkpoint(tmp_path / "step-00000007")


def test_a_rank_that_has_ended_after_its_part_is_no_loss(tmp_path: Path) -> None:
    write_part(tmp_path, 1, 9, number=5)
    note_ended(tmp_path, 1)
    verify_checkpoint(write_joined(tmp_path, 9, 5, size=2))


def test_the_reason_of_a_rank_that_could_not_save_is_told(tmp_path: Path) -> None:
    place = parts.part_folder(tmp_path, TOKEN, 1)
    place.mkdir(parents=True)
    parts.note_failed(place, {"rank": 1, "number": 5}, "the disk is full")
    with pytest.raises(parts.PartLost, match="rank 1 could not save its part: the disk is full"):
        write_joined(tmp_path, 9, 5, size=2)


def test_a_part_of_another_save_is_never_taken(tmp_path: Path) -> None:
    write_part(tmp_path, 1, 9, number=4)
    note_ended(tmp_path, 1)
    with pytest.raises(parts.PartLost):
        write_joined(tmp_path, 9, 5, size=2)


def test_a_part_that_never_comes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PATIENCE_S", 3)  # of the clock of `write_joined`, which counts the looks
    with pytest.raises(parts.PartLost, match="the part of rank 1 did not come within 3 s"):
        write_joined(tmp_path, 9, 5, size=2)


def test_parts_of_earlier_attempts_are_deleted(tmp_path: Path) -> None:
    write_part(tmp_path, 1, 9, number=4)
    parts.clear_parts(tmp_path, TOKEN)
    assert list(tmp_path.glob(f"{parts.PARTS}*/*/step-*"))
    parts.clear_parts(tmp_path, "another")
    assert not list(tmp_path.glob(f"{parts.PARTS}*"))

"""A stranger's run is kept in a second place and comes back from it, onto a machine that has nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from jackline.checkpoint.mirror.engine import Requests, keep_mirrored
from jackline.checkpoint.mirror.store import open_store
from jackline.errors import CannotResume, UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, boot_id, host_name
from jackline.rundir.records.mirror import read_mirror
from jackline.rundir.run_file import describe_run, read_run_file, write_run_file
from jackline.supervisor.foreign.fetch import argv_here, fetch_stranger, is_mirror
from jackline.supervisor.foreign.mirror import foreign_mirror, whole_checkpoints

GONE = ProcessId(2**22 + 7, 1, host_name(), boot_id())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    work = tmp_path / "here"
    work.mkdir()
    run = RunDir(work / "runs" / "job")
    run.path.mkdir(parents=True)
    write_run_file(run, describe_run("job", kind="run", argv=["train"], settings={}, options={}, cwd=work))
    run.out_log.write_text("2026-11-15T02:13:39.1Z step 1\n")
    return run


def upload(run: RunDir, place: str, pattern: str) -> bool:
    return foreign_mirror(run, open_store(place), pattern).work(0.0)


def write_checkpoint(run: RunDir, name: str, text: str) -> Path:
    path = Path(read_run_file(run).cwd) / "out" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() + 1, time.time() + 1))
    return path


def test_story_and_checkpoint_come_back_on_an_empty_machine(run: RunDir, tmp_path: Path) -> None:
    write_checkpoint(run, "step-10.json", "ten")
    mirror = foreign_mirror(run, open_store(str(tmp_path / "mirror")), "out/step-*.json")
    keep_mirrored(mirror, GONE, Requests(None), 600.0, [])
    there = tmp_path / "there"
    there.mkdir()
    fetched = fetch_stranger(str(tmp_path / "mirror"), there / "runs", there)
    assert fetched.checkpoint == there / "out" / "step-10.json"
    assert fetched.checkpoint.read_text() == "ten"
    assert read_run_file(fetched.run).cwd == str(there)
    assert fetched.run.out_log.read_text() == run.out_log.read_text()
    assert "brought back out/step-10.json from the mirror" in fetched.said


def test_a_folder_is_brought_back_as_a_folder(run: RunDir, tmp_path: Path) -> None:
    folder = Path(read_run_file(run).cwd) / "out" / "checkpoint-7"
    (folder / "deep").mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "deep" / "a.txt").write_text("a")
    assert upload(run, str(tmp_path / "mirror"), "out/checkpoint-*")
    there = tmp_path / "there"
    there.mkdir()
    fetched = fetch_stranger(f"{tmp_path}/mirror/job", there / "runs", there)
    assert fetched.checkpoint is not None
    assert (fetched.checkpoint / "deep" / "a.txt").read_text() == "a"


def test_an_upload_that_was_cut_off_does_not_count_and_the_one_before_is_used(run: RunDir, tmp_path: Path) -> None:
    place = str(tmp_path / "mirror")
    write_checkpoint(run, "step-10.json", "ten")
    assert upload(run, place, "out/step-*.json")
    store = open_store(place)
    store.put_bytes(b"tw", "job/foreign/step-20.json-ffffffffffffff/step-20.json")
    assert [name.split("-")[1] for name in whole_checkpoints(store, "job")] == ["10.json"]
    there = tmp_path / "there"
    there.mkdir()
    fetched = fetch_stranger(place, there / "runs", there)
    assert fetched.checkpoint is not None and fetched.checkpoint.name == "step-10.json"


def test_a_truncated_file_in_the_mirror_is_told_and_not_used(run: RunDir, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    write_checkpoint(run, "step-10.json", "ten bytes!")
    assert upload(run, str(place), "out/step-*.json")
    next(place.rglob("step-10.json")).write_text("ten")
    there = tmp_path / "there"
    there.mkdir()
    fetched = fetch_stranger(str(place), there / "runs", there)
    assert fetched.checkpoint is None
    assert any("has 3 bytes, 10 were uploaded" in text for text in fetched.said)
    assert not (there / "out" / "step-10.json").exists()


def test_a_mirror_cannot_write_outside_the_folder_one_stands_in(run: RunDir, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    write_checkpoint(run, "step-10.json", "ten")
    assert upload(run, str(place), "out/step-*.json")
    where = next(place.rglob("where.json"))
    where.write_text(json.dumps({**json.loads(where.read_text()), "relative": "../../evil"}))
    there = tmp_path / "deep" / "there"
    there.mkdir(parents=True)
    fetched = fetch_stranger(str(place), there / "runs", there)
    assert fetched.checkpoint is None
    assert not (tmp_path / "evil").exists()


def test_only_the_newest_two_checkpoints_and_three_stories_are_kept(run: RunDir, tmp_path: Path) -> None:
    place = str(tmp_path / "mirror")
    for number in range(5):
        path = write_checkpoint(run, f"step-{number}.json", str(number))
        os.utime(path, (time.time() + number, time.time() + number))
        assert upload(run, place, "out/step-*.json")
    store = open_store(place)
    assert [name.split(".")[0] for name in whole_checkpoints(store, "job")] == ["step-4", "step-3"]
    assert len([name for name in store.names("job") if name.startswith("run-")]) == 3


def test_a_mirror_that_cannot_be_written_is_noted_and_ends_nothing(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert not upload(run, str(tmp_path / "file" / "mirror"), "")
    assert "Not a directory" in str(read_mirror(run.mirror_file).trouble.why)


def test_a_mirror_with_several_runs_or_none_is_an_error_that_says_what_to_type(run: RunDir, tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    assert upload(run, str(place), "")
    (place / "job").rename(place / "a")
    store = open_store(str(place))
    store.put_bytes(b"x", "b/run-000001.tar.gz")
    with pytest.raises(UsageError) as several:
        fetch_stranger(str(place), tmp_path / "runs", tmp_path)
    assert str(several.value) == f"error: {place} holds 2 runs: a, b\nhint: name one: {place}/a"
    with pytest.raises(CannotResume) as none:
        fetch_stranger(str(tmp_path / "nothing"), tmp_path / "runs", tmp_path)
    assert "holds no mirrored run" in str(none.value)


def test_a_run_folder_is_not_taken_for_a_mirror(run: RunDir, tmp_path: Path) -> None:
    assert not is_mirror(str(run.path))
    assert is_mirror("s3://bucket/runs")


def test_a_command_from_another_machine_is_made_to_fit_this_one(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "job"
    mine = ["/gone/bin/python3", "train.py", "mirror=/old"]

    assert argv_here(mine, run, "/mnt/new") == (sys.executable, "train.py", "mirror=/old")
    assert argv_here(["bash", "train.sh"], run, "/mnt/new") == ("bash", "train.sh")
    ours = [sys.executable, "-m", "jackline.trainer", "/old/runs/job", "demo", "--quick", "mirror=/old/mirror"]
    there = (sys.executable, "-m", "jackline.trainer", str(run), "demo", "--quick")
    assert argv_here(ours, run, "/mnt/new") == (*there, "mirror=/mnt/new")
    assert argv_here(ours, run, "s3://bucket/runs") == (*there, "mirror=s3://bucket/runs")

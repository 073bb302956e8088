"""A stranger's run is kept in a second place and comes back from it, onto a machine that has nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.mirror.engine import Requests, keep_mirrored
from jackline.checkpoint.mirror.store import FolderStore, Moved, open_store
from jackline.checkpoint.mirror.upload import own_mirror
from jackline.errors import CannotResume, UsageError
from jackline.rundir.find import is_mirror
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, boot_id, host_name
from jackline.rundir.records.mirror import read_mirror
from jackline.rundir.records.supervisor import CheckpointRecord, SupervisorRecord, write_supervisor
from jackline.rundir.run_file import describe_run, read_run_file, write_run_file
from jackline.supervisor.foreign.fetch import Fetched, argv_here, fetch_stranger
from jackline.supervisor.foreign.mirror import foreign_mirror, whole_checkpoints
from jackline.supervisor.foreign.seen import own_newest
from tests.checkpoint.states import write_small

GONE = ProcessId(2**22 + 7, 1, host_name(), boot_id())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    work = tmp_path / "here"
    work.mkdir()
    run = RunDir(work / "runs" / "job")
    run.path.mkdir(parents=True)
    options = {"checkpoints": "out/*"}
    write_run_file(run, describe_run("job", kind="run", argv=["train"], settings={}, options=options, cwd=work))
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


# -- what comes back -------------------------------------------------------------------------------------------------


def attached(run: RunDir, *, step: int, saved: int) -> None:
    """As if a session had trained to `step`."""
    body = {"step": step, "last_checkpoint": {"step": saved, "path": str(run.checkpoints / f"step-{saved:08d}")}}
    run.session_file().write_text(json.dumps(body))
    run.checkpoints.mkdir(exist_ok=True)


def bring(run: RunDir, tmp_path: Path, **more: bool) -> Fetched:
    there = tmp_path / "there"
    there.mkdir(exist_ok=True)
    return fetch_stranger(f"{tmp_path}/mirror/job", there / "runs", there, **more)


def test_jacklines_own_checkpoint_comes_back_with_the_run(run: RunDir, tmp_path: Path) -> None:
    attached(run, step=9, saved=8)
    write_small(run.checkpoints, 4)
    place = str(tmp_path / "mirror")
    assert own_mirror(run, open_store(place), 0.0).work(0.0)
    run_file = replace(read_run_file(run), options={"mirror": "/mnt/of/another/machine"})
    write_run_file(run, run_file)
    assert upload(run, place, "")
    fetched = bring(run, tmp_path)
    assert list_names(fetched.run.checkpoints) == [Name(4)]
    assert "brought back step-00000004 from the mirror; step 8 was saved, but never uploaded" in fetched.said
    assert own_newest(fetched.run) == str(fetched.run.checkpoints / "step-00000004")
    assert read_run_file(fetched.run).options["mirror"] == place  # not where the other machine had it


@pytest.mark.parametrize("has_first", [False, True])
def test_a_run_with_progress_and_no_checkpoint_in_its_mirror_is_refused(
    run: RunDir, tmp_path: Path, has_first: bool
) -> None:
    """It began at step 0 again, without a word."""
    attached(run, step=600, saved=590)
    if has_first:
        write_small(run.checkpoints, 0)
    assert own_mirror(run, open_store(str(tmp_path / "mirror")), 0.0).work(0.0)
    with pytest.raises(CannotResume) as refused:
        bring(run, tmp_path)
    has = "only its checkpoint of step 0" if has_first else "no checkpoint of it"
    assert str(refused.value) == (
        f"error: run 'job' had reached step 600, and the mirror {tmp_path}/mirror has {has}\n"
        f"hint: resume it where it ran, or begin anew: jackline resume {tmp_path}/mirror/job --from-scratch"
    )
    assert refused.value.exit_code == 3
    assert not list((tmp_path / "there" / "runs").iterdir())  # nothing is left of the try
    assert bring(run, tmp_path, from_scratch=True).run.has_run_file


def test_a_script_whose_checkpoint_was_never_uploaded_is_refused(run: RunDir, tmp_path: Path) -> None:
    write_supervisor(run, SupervisorRecord(at_s=1.0, checkpoint=CheckpointRecord("/there/out/step-10.json", 1.0)))
    assert upload(run, str(tmp_path / "mirror"), "")
    with pytest.raises(CannotResume, match=r"had written /there/out/step-10.json, and the mirror .* no whole"):
        bring(run, tmp_path)


def test_a_flipped_byte_in_the_mirror_is_noticed(run: RunDir, tmp_path: Path) -> None:
    """Only the length was compared."""
    write_checkpoint(run, "step-10.json", "ten")
    assert upload(run, str(tmp_path / "mirror"), "out/step-*.json")
    next((tmp_path / "mirror").rglob("step-10.json")).write_text("tex")
    fetched = bring(run, tmp_path)
    assert fetched.checkpoint is None
    assert any("step-10.json has other contents than were uploaded" in text for text in fetched.said)


def test_a_checkpoint_that_is_rewritten_during_its_upload_is_not_mixed(run: RunDir, tmp_path: Path) -> None:
    path = write_checkpoint(run, "last.json", "one")
    rewrites = ["two"]

    class Slow(FolderStore):
        def put(self, local: Path, name: str, moved: Moved | None = None) -> None:
            if rewrites:
                path.write_text(rewrites.pop())
            super().put(local, name, moved)

    mirror = foreign_mirror(run, Slow(tmp_path / "mirror"), "out/last.json")
    assert not mirror.work(0.0)
    assert "changed while it was uploaded" in str(mirror.record.trouble.why)
    assert mirror.work(1.0)
    fetched = bring(run, tmp_path)
    assert fetched.checkpoint is not None and fetched.checkpoint.read_text() == "two"

"""A run's folder: made whole or not at all, by one process at a time, and claimed anew when that was killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.rundir.create import claim_run, find_existing, is_unfinished
from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock
from jackline.rundir.run_file import DamagedRun, RunFile, read_run_file
from tests.deadline import HANGS_S
from tests.rundir.made import make_run, write_exit

HINT = "choose another place"

# Forks a creator that is killed before its nth line of code in `rundir`, then claims the run as the next start does.
EVERY_LINE = """
import json, os, signal, sys
from pathlib import Path
from jackline.rundir import create
from tests.rundir.test_create import HINT, contents

folder, how = Path(sys.argv[1]), sys.argv[2]

def kill_at_line(nth):
    seen = [0]
    def trace(frame, event, argument):
        if "/jackline/rundir/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == nth:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)

def creator(run, nth):
    if how == "healing":
        create.claim_run(run, contents(run, "dead"), hint=HINT).release()
    kill_at_line(nth)
    claim = create.claim_run(run, contents(run, "killed"), hint=HINT)
    if how == "abandoning":
        claim.abandon()
    os._exit(0)

nth = 0
while True:
    nth += 1
    run = create.RunDir(folder / f"run{nth}")
    pid = os.fork()
    if pid == 0:
        creator(run, nth)
    status = os.waitpid(pid, 0)[1]
    claim = create.claim_run(run, contents(run, "next"), hint=HINT, patience_s=0.0)
    assert claim is not None, nth
    assert create.read_run_file(run).argv == ("next",), nth
    rival = create.RunLock(run.lock)
    assert not rival.try_acquire(), nth
    claim.release()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [], nth
    assert sorted(path.name for path in run.path.iterdir()) == ["lock", "run.json"], nth
    if status == 0:
        break
print(nth)
"""


def contents(run: RunDir, *argv: str) -> RunFile:
    return RunFile(run.name, "run", argv, "/", {"argv": list(argv)}, {}, time.time(), "here", "boot")


@pytest.mark.parametrize("how", ["making", "healing", "abandoning"])
def test_a_creator_killed_at_any_line_leaves_a_name_that_the_next_start_can_have(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERY_LINE, str(tmp_path), how], capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40, "the creator was hardly killed at all"


def test_a_new_run_is_whole_and_held_by_its_creator(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "one")
    claim = claim_run(run, contents(run, "train"), hint=HINT)
    assert claim is not None
    assert read_run_file(run).argv == ("train",)
    assert not RunLock(run.lock).try_acquire()
    assert is_unfinished(run)
    claim.release()
    rival = RunLock(run.lock)
    assert rival.try_acquire()
    rival.release()


def test_a_run_that_has_begun_is_nobody_elses(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    write_exit(run, 1)
    assert claim_run(run, contents(run, "other"), hint=HINT) is None
    assert read_run_file(run).argv == ("python", "train.py")


def test_a_creator_that_stands_still_is_waited_for_and_then_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "one")
    holder = claim_run(run, contents(run, "first"), hint=HINT)
    assert holder is not None
    with pytest.raises(UsageError) as caught:
        claim_run(run, contents(run, "second"), hint=HINT, patience_s=0.0)
    assert (
        caught.value.message == "another process has been starting run 'one' for 0 s and has not started its command"
    )
    assert read_run_file(run).argv == ("first",)
    holder.release()


def test_an_abandoned_run_leaves_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "one")
    claim = claim_run(run, contents(run, "train"), hint=HINT)
    assert claim is not None
    claim.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_an_attempt_is_not_abandoned(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "one")
    claim = claim_run(run, contents(run, "train"), hint=HINT)
    assert claim is not None
    run.attempt(1).path.mkdir(parents=True)
    claim.abandon()
    assert run.has_run_file


def test_a_place_that_cannot_be_written_is_said_with_the_hint(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    run = RunDir(tmp_path / "runs" / "one")
    with pytest.raises(UsageError) as caught:
        claim_run(run, contents(run, "train"), hint=HINT)
    assert (caught.value.message, caught.value.hint) == (
        f"cannot make a run in {run.path.parent}: Not a directory",
        HINT,
    )


def test_a_folder_of_somebody_else_is_never_claimed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "data")
    run.path.mkdir()
    (run.path / "thesis.tex").touch()
    assert not is_unfinished(run)
    assert claim_run(run, contents(run, "train"), hint=HINT) is None
    with pytest.raises(DamagedRun, match="is not a run"):
        find_existing(run)
    assert [path.name for path in run.path.iterdir()] == ["thesis.tex"]


def test_records_without_an_attempt_are_resumed_and_not_made_anew(tmp_path: Path) -> None:
    """From a mirror: a checkpoint is there, the command was never started on this machine."""
    run = make_run(tmp_path / "one", settings={"lr": 1})
    run.checkpoints.mkdir()
    existing = find_existing(run)
    assert existing is not None
    assert (existing.state, existing.settings) == ("dead", {"lr": 1})


def test_an_unfinished_run_with_a_damaged_run_file_can_be_had(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    run.run_file.write_text(json.dumps([1]))
    existing = find_existing(run)
    assert existing is not None
    assert existing.state == "empty"
    claim = claim_run(run, contents(run, "train"), hint=HINT)
    assert claim is not None
    claim.release()
    assert read_run_file(run).argv == ("train",)

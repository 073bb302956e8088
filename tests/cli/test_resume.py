"""`jackline resume`: what it refuses before anything is started."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from jackline.checkpoint.format.catalogue import list_rewinds
from jackline.checkpoint.mirror.store import FolderStore
from jackline.checkpoint.mirror.upload import own_mirror
from jackline.cli.commands.resume import bring_here, command, settle
from jackline.errors import CannotResume, UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.records.start import StartRecord
from jackline.rundir.records.start import write_start as write_bare_start
from jackline.rundir.registry import register
from jackline.rundir.run_file import read_run_file
from tests.checkpoint.states import write_small
from tests.rundir.made import foreign_process, make_run, this_process, write_exit, write_start, write_state

NEVER = ("false",)  # no test here comes as far as starting it


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(command, list(words), catch_exceptions=False)
    return str(caught.value)


@pytest.fixture
def run(clean_environment: Path) -> RunDir:
    made = make_run(clean_environment / "story", cwd=str(clean_environment.parent), argv=NEVER)
    register(made, vouched=True)
    made.checkpoints.mkdir()
    for step in (2, 4):
        write_small(made.checkpoints, step)
    return made


def test_a_live_run_is_watched_and_not_taken_back(run: RunDir) -> None:
    """Of several that resume a run at once, one starts it and the others see it alive."""
    write_start(run, this_process())
    write_state(run, this_process())
    done = CliRunner().invoke(command, ["story", "--detach"], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, f"[jackline] run 'story' is alive already: {run.path}\n")
    assert refusal("story", "--step", "2") == "error: run 'story' is alive\nhint: jackline watch story"
    assert list_rewinds(run.checkpoints) == []


def test_a_live_run_without_a_supervisor_is_refused_in_words(run: RunDir) -> None:
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    write_bare_start(attempt, StartRecord(this_process(), started_at_s=1.0, is_bare=True))
    assert refusal("story") == (
        f"error: run 'story' is alive in process {os.getpid()}, which was started without a supervisor\n"
        "       its output goes to the terminal that it was started in\n"
        "hint: `jackline status story` shows its progress; after `jackline stop story` it can be resumed"
    )


@pytest.mark.parametrize("is_bare", [False, True])
def test_here_is_refused_while_the_other_machine_still_writes_heartbeats(run: RunDir, is_bare: bool) -> None:
    write_start(run, foreign_process())
    if is_bare:
        run.session_file().write_text(json.dumps({"at_s": time.time() - 1}))
    else:
        write_state(run, foreign_process(), at_s=time.time() - 1)
    text = refusal("story", "--here")
    assert text.startswith("error: run 'story' is alive on 'gpu-box' (process 4242): its last heartbeat is ")
    assert "\nhint: stop it there: jackline stop story; if it has just been killed, try again in 30 s" in text


def test_here_is_refused_while_a_heartbeat_by_another_clock_moves(run: RunDir) -> None:
    write_start(run, foreign_process())
    write_state(run, foreign_process(), at_s=time.time() - 600)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            write_state(run, foreign_process(), at_s=time.time() - 600)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert refusal("story", "--here").startswith("error: run 'story' is alive on 'gpu-box'")
    finally:
        ended.set()
        thread.join()


def test_a_run_continues_in_a_renamed_folder_with_the_interpreter_that_is_there(
    clean_environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "renamed"
    (work / "runs").mkdir(parents=True)
    (work / "x.py").touch()
    old = tmp_path / "old"
    argv = (f"{old}/.venv/bin/python", "-u", f"{old}/x.py", "--out", f"{old}/out", "--lr", "1")
    settings = {"argv": list(argv), "cwd": str(old)}
    run = make_run(work / "runs" / "x", cwd=str(old), argv=argv, settings=settings)
    settled = settle(run, read_run_file(run))
    assert settled.cwd == str(work)
    assert settled.argv == (sys.executable, "-u", f"{work}/x.py", "--out", f"{work}/out", "--lr", "1")
    assert settled == read_run_file(run)
    assert capsys.readouterr().err == (
        f"[jackline] run 'x' ran in {old}, which is not here: it continues in {work}\n"
        f"[jackline] there is no {work}/.venv/bin/python here: it continues with {sys.executable}\n"
    )


def test_a_run_of_a_notebook_is_resumed_by_its_cell(clean_environment: Path) -> None:
    run = make_run(clean_environment / "cell", cwd=str(clean_environment.parent), argv=("notebook",))
    with pytest.raises(CannotResume) as caught:
        settle(run, read_run_file(run))
    assert str(caught.value) == (
        "error: run 'cell' was started in a notebook, so there is no command to start again\n"
        "hint: run its cell again: jackline.attach resumes it"
    )


def test_a_run_whose_script_cannot_be_found_is_refused_with_the_next_step(clean_environment: Path) -> None:
    settings = {"argv": ["python", "x.py"], "cwd": "/gone/work"}
    run = make_run(clean_environment / "x", cwd="/gone/work", argv=("python", "x.py"), settings=settings)
    with pytest.raises(CannotResume) as caught:
        settle(run, read_run_file(run))
    assert str(caught.value) == (
        "error: run 'x' ran in /gone/work, which is not here\n"
        f"hint: cd to the folder that has x.py now, then: jackline resume {run.path}"
    )


def test_a_finished_run_is_gone_on_with_only_from_an_earlier_step(run: RunDir) -> None:
    write_exit(run, 0)
    assert refusal("story") == (
        "error: run 'story' has finished\n"
        "hint: start it again: jackline run --new -- ...; or go back: jackline resume --step N"
    )
    run.foreign_file.write_text("{}")  # its script writes its own checkpoints
    assert refusal("story").endswith("or go back: jackline resume --from CHECKPOINT")
    run.foreign_file.unlink()
    assert refusal("story", "--step", "3") == (
        f"error: there is no checkpoint of step 3 in {run.checkpoints}\n"
        "       here: step-00000004, step-00000002\n"
        "hint: --step N of those above"
    )


def test_a_strangers_own_checkpoints_are_not_ours_to_choose_from(clean_environment: Path) -> None:
    make = make_run(clean_environment / "theirs", cwd="/", argv=NEVER, options={"checkpoints": "out/*.pt"})
    write_exit(make, 1)
    register(make, vouched=True)
    assert refusal("theirs", "--step", "2") == (
        "error: --step is for Jackline's own checkpoints; run 'theirs' writes its own (out/*.pt)\n"
        "hint: name the file or folder: jackline resume theirs --from PATH"
    )


def test_a_run_out_of_a_mirror_comes_with_the_mirrors_place(run: RunDir, tmp_path: Path) -> None:
    far = tmp_path / "far"
    assert own_mirror(run, FolderStore(far), 0.0, place=str(far)).work(0.0)
    brought = bring_here(str(far), tmp_path / "elsewhere")
    assert brought == (RunDir(tmp_path / "elsewhere" / "story"), str(far))
    assert bring_here("story", run.path.parent) is None

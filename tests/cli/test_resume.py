"""`jackline resume`: what it refuses before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from jackline.checkpoint.format.catalogue import list_names, list_rewinds
from jackline.checkpoint.mirror.store import FolderStore
from jackline.checkpoint.mirror.upload import Mirror
from jackline.cli.commands.resume import bring_here, command
from jackline.errors import UsageError
from jackline.rundir.layout import RunDir
from tests.checkpoint.states import write_small
from tests.rundir.made import make_run, this_process, write_exit, write_start, write_state

NEVER = ("false",)  # no test here comes as far as starting it


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(command, list(words), catch_exceptions=False)
    return str(caught.value)


@pytest.fixture
def run(clean_environment: Path) -> RunDir:
    made = make_run(clean_environment / "story", cwd=str(clean_environment.parent), argv=NEVER)
    made.checkpoints.mkdir()
    for step in (2, 4):
        write_small(made.checkpoints, step)
    return made


def test_a_live_run_is_neither_gone_on_with_nor_taken_back(run: RunDir) -> None:
    write_start(run, this_process())
    write_state(run, this_process())
    for words in (("story",), ("story", "--step", "2")):
        assert refusal(*words) == "error: run 'story' is alive\nhint: jackline watch story"
    assert list_rewinds(run.checkpoints) == []


def test_a_finished_run_is_gone_on_with_only_from_an_earlier_step(run: RunDir) -> None:
    write_exit(run, 0)
    assert refusal("story") == (
        "error: run 'story' has finished\n"
        "hint: start it again: jackline run --new -- ...; or go back: jackline resume --step N"
    )
    assert refusal("story", "--step", "3") == (
        f"error: there is no checkpoint of step 3 in {run.checkpoints}\n"
        "       here: step-00000004, step-00000002\n"
        "hint: --step N of those above"
    )


def test_a_strangers_own_checkpoints_are_not_ours_to_choose_from(clean_environment: Path) -> None:
    make = make_run(clean_environment / "theirs", cwd="/", argv=NEVER, options={"checkpoints": "out/*.pt"})
    write_exit(make, 1)
    assert refusal("theirs", "--step", "2") == (
        "error: --step is for Jackline's own checkpoints; run 'theirs' writes its own (out/*.pt)\n"
        "hint: name the file or folder: jackline resume theirs --from PATH"
    )


def test_a_run_out_of_a_mirror_comes_with_the_mirrors_place(run: RunDir, tmp_path: Path) -> None:
    far = tmp_path / "far"
    mirror = Mirror(run, run.checkpoints, FolderStore(far), 0.0, str(far))
    mirror.upload(list_names(run.checkpoints)[0])
    mirror.upload_story()
    brought = bring_here(str(far), tmp_path / "elsewhere")
    assert brought == (RunDir(tmp_path / "elsewhere" / "story"), str(far))
    assert bring_here("story", run.path.parent) is None

"""A script with checkpoints of its own and a mirror: it is finished when its last checkpoint is there."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from jackline.rundir.records.mirror import read_mirror
from tests.shell import Shell, wait_for

pytestmark = pytest.mark.zoo

SCRIPT = """
import json, os, sys, time
step = json.load(open(sys.argv[1]))["step"] if len(sys.argv) > 1 else 0
print("started at", step, flush=True)
for step in range(step + 1, 4):
    with open(f"step-{step}.tmp", "w") as file:
        json.dump({"step": step}, file)
    os.rename(f"step-{step}.tmp", f"step-{step}.json")
    print("saved", step, flush=True)
    while os.path.exists("hold"): time.sleep(0.01)
"""


def words_for(shell: Shell, *more: str) -> list[str]:
    (shell.work / "train.py").write_text(SCRIPT)
    checkpoints = ["--checkpoints", "step-*.json", "--resume-arg", "{checkpoint}"]
    mirror = ["--mirror", str(shell.work / "far")]
    return ["run", "--name", "mine", *checkpoints, *mirror, *more, "--", sys.executable, "train.py"]


def uploads(shell: Shell) -> list[str]:
    found = (shell.work / "far" / "mine" / "foreign").glob("*/where.json")
    return sorted(path.parent.name.split(".")[0] for path in found)


def test_a_command_whose_checkpoint_is_not_in_the_mirror_has_not_finished_and_is_not_run_again(shell: Shell) -> None:
    """It was sealed as finished, and `resume` refused to upload the rest."""
    (shell.work / "far").mkdir()
    (shell.work / "far" / "mine").write_text("a file where a folder should be")
    done = shell.jackline(*words_for(shell, "--mirror-patience", "1s"))
    assert done.code == 75, str(done)
    assert "the command has finished, but step-3.json-" in str(done)
    assert "hint: `jackline resume mine` uploads the rest" in str(done)
    assert "next start: only uploads what the mirror lacks: step-3.json-" in shell.jackline("status", "mine").out
    (shell.work / "far" / "mine").unlink()
    again = shell.jackline("resume", "mine")
    assert again.code == 0, str(again)
    assert "attempt 2 only uploads what the mirror lacks" in str(again)
    assert "started at" not in str(again)
    assert uploads(shell) == ["step-3"]
    assert "finished" in shell.jackline("status", "mine").out.splitlines()[0]


def test_a_killed_mirror_of_a_script_is_started_again_and_this_is_reported(shell: Shell) -> None:
    """Nobody noticed, and the mirror kept the first checkpoint."""
    (shell.work / "hold").touch()
    live = shell.start(*words_for(shell))
    file = shell.runs / "mine" / "mirror.json"

    def pid() -> int:
        process = read_mirror(file).process
        return process.pid if process else 0

    wait_for(lambda: uploads(shell) == ["step-1"], "the first upload")
    killed = pid()
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: pid() not in (0, killed), "another mirror process")
    (shell.work / "hold").unlink()
    assert live.wait() == 0, live.text()
    assert f"the mirror stopped: its process {killed} was killed by SIGKILL; starting another" in live.text()
    assert "step-3" in uploads(shell)

"""A run with a mirror: it is finished when its last checkpoint is there, and it is never begun anew by mistake."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

from jackline.checkpoint.format.catalogue import list_names
from jackline.checkpoint.mirror.engine import LOCK
from jackline.checkpoint.writer.lock import read_holder
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import is_alive
from jackline.rundir.records.exit import read_exit
from jackline.rundir.records.mirror import read_mirror
from jackline.rundir.status import read_status
from tests.session.nursery import Ended, Nursery
from tests.shell import wait_for

LOOP = """
import os, sys, time, torch, jackline
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 4)), batch_size=4, shuffle=True)
more = {"mirror": os.path.abspath("far")} if "JACKLINE_RUN_DIR" not in os.environ else {}
with jackline.attach(
    model=model, optimizer=optimizer, loader=loader, name="x", save_every_steps=4,
    mirror_patience_s=float(os.environ.get("PATIENCE", "200")), **more
) as run:
    for (batch,) in run.steps(total=12):
        loss = model(batch).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if run.step == 6 and os.environ.get("HOLD"):
            print("holding", flush=True)
            while not os.path.exists("go"): time.sleep(0.01)
print("final", run.step, model.weight.sum().item().hex())
"""


def run_loop(nursery: Nursery, folder: Path, **env: str) -> Ended:
    return nursery.run(LOOP, [], folder, env)


def final(output: str) -> str:
    return next((line for line in output.splitlines() if line.startswith("final")), "")


def mirrored_steps(folder: Path) -> list[int]:
    found = (folder / "far" / "x" / "checkpoints").glob("step-*/manifest.json")
    return sorted(int(path.parent.name.split("-")[1]) for path in found)


def test_a_finished_run_has_its_last_checkpoint_in_the_mirror(nursery: Nursery, tmp_path: Path) -> None:
    done = run_loop(nursery, tmp_path)
    assert done.code == 0, done.output
    assert 12 in mirrored_steps(tmp_path)
    assert read_status(RunDir(tmp_path / "runs" / "x")).state == "finished"


def test_a_complete_run_that_is_not_in_its_mirror_is_not_finished_and_only_uploads_when_resumed(
    nursery: Nursery, tmp_path: Path
) -> None:
    """It was sealed as finished, with nothing in the mirror."""
    (tmp_path / "far").write_text("a file where a folder should be")
    done = run_loop(nursery, tmp_path, PATIENCE="0.2")
    run = RunDir(tmp_path / "runs" / "x")
    assert done.code == 75, done.output
    assert "complete at step 12, but not finished: step-00000012 is not in the mirror yet: 0 B of" in done.output
    assert "nothing of this run is there" in done.output
    assert "`jackline resume x` uploads the rest" in done.output
    assert final(done.output) == ""  # what stands behind the block is for runs that are complete
    assert read_status(run).state == "stopped"
    (tmp_path / "far").unlink()
    again = run_loop(nursery, tmp_path)
    assert again.code == 0 and final(again.output).startswith("final 12 "), again.output
    assert 12 in mirrored_steps(tmp_path)
    assert read_status(run).state == "finished"
    events = [json.loads(line) for line in run.session_events().read_text().splitlines()]
    assert next(event["step"] for event in events if event["event"] == "resumed") == 12  # no step was repeated


def test_the_mirror_of_the_supervisor_reaches_the_loop(nursery: Nursery, tmp_path: Path) -> None:
    """`jackline run --mirror` copied the run's records alone, and a run out of its mirror began at step 0."""
    run = RunDir(tmp_path / "runs" / "x")
    (run.path / "attempts" / "001").mkdir(parents=True)
    run.run_file.write_text(json.dumps({"format": 1, "name": "x"}))
    env = {"JACKLINE_RUN_DIR": str(run.path), "JACKLINE_ATTEMPT": "1", "JACKLINE_MIRROR": str(tmp_path / "far")}
    done = run_loop(nursery, tmp_path, **env, JACKLINE_MIRROR_PATIENCE="60")
    assert done.code == 0, done.output
    assert 12 in mirrored_steps(tmp_path)


def test_a_mirror_that_is_killed_while_the_loop_runs_is_started_again_and_this_is_reported(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Nobody noticed: the mirror had step 0 when the run ended."""
    child = nursery.start(LOOP, [], tmp_path, {"HOLD": "1"})
    checkpoints = tmp_path / "runs" / "x" / "checkpoints"

    def mirror_pid() -> int | None:
        process = read_mirror(checkpoints / "mirror.json").process
        return process.pid if process else None

    wait_for(lambda: mirrored_steps(tmp_path) and "holding" in child.output, "the first upload")
    killed = mirror_pid()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: mirror_pid() != killed, "another mirror process")
    (tmp_path / "go").touch()
    done = child.wait()
    assert done.code == 0, done.output
    assert f"the mirror stopped: its process {killed} was killed by SIGKILL; starting another" in done.output
    assert 12 in mirrored_steps(tmp_path)


def test_a_run_that_was_saved_is_not_begun_anew_without_its_checkpoints(nursery: Nursery, tmp_path: Path) -> None:
    assert run_loop(nursery, tmp_path).code == 0
    run = RunDir(tmp_path / "runs" / "x")
    mirror = read_mirror(run.checkpoints / "mirror.json").process
    wait_for(lambda: not is_alive(mirror), "the mirror's own end: it writes there until then")
    for path in (run.checkpoints, tmp_path / "far"):
        shutil.rmtree(path)
    read_exit_path = run.attempt(1).exit_file
    read_exit_path.write_text(json.dumps({**json.loads(read_exit_path.read_text()), "exit_code": 1}))
    again = run_loop(nursery, tmp_path)
    assert again.code == 3, again.output
    assert "error: run 'x' was saved at step 12, and no checkpoint of it is left" in again.output
    assert "jackline resume x --from-scratch" in again.output
    third = run_loop(nursery, tmp_path)
    assert third.code == 3, "the refusal itself must not count as progress that begins anew"
    anew = run_loop(nursery, tmp_path, JACKLINE_FROM_SCRATCH="1")
    assert anew.code == 0 and final(anew.output).startswith("final 12 "), anew.output
    assert read_exit(run.attempt(4)).exit_code == 0


def test_a_run_whose_machine_is_lost_ends_bit_equal_out_of_its_mirror(nursery: Nursery, tmp_path: Path) -> None:
    """The mirror is killed, then the training; the second mirror uploads; then every file of the run is gone."""
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    whole.mkdir()
    lost.mkdir()
    wanted = run_loop(nursery, whole)
    child = nursery.start(LOOP, [], lost, {"HOLD": "1"})
    child.wait_for("holding")
    checkpoints = lost / "runs" / "x" / "checkpoints"
    wait_for(lambda: list_names(checkpoints)[0].step == 4 and mirrored_steps(lost), "the save of step 4")
    killed = read_mirror(checkpoints / "mirror.json").process
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    wait_for(lambda: read_mirror(checkpoints / "mirror.json").process != killed, "another mirror process")
    child.kill()
    child.wait()
    wait_for(lambda: not is_alive(read_holder(checkpoints / LOCK).writer), "the mirror's own end")
    shutil.rmtree(lost / "runs")
    again = run_loop(nursery, lost)
    assert again.code == 0, again.output
    assert "resuming from step-00000004" in again.output
    assert final(again.output) == final(wanted.output) != ""

"""Sentinels and curves in the trainer's own loop, as real processes: a NaN, a kill, and a healthy run."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from jackline.rundir.layout import RunDir
from jackline.session.metrics.tensorboard import event_files
from jackline.trainer.report.facts import next_commands
from tests.data.corpora import make_texts
from tests.session.nursery import EVERY_SAVE, Ended, Nursery

SCRIPT = Path(__file__).with_name("planted.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("planted")
    (made / "text").mkdir()
    for number, text in enumerate(make_texts(200)):
        (made / "text" / f"{number:03d}.txt").write_text(text)
    return made


def run(nursery: Nursery, folder: Path, run_dir: RunDir, *words: str) -> Ended:
    """Every third step is saved, however slow the disk is."""
    return nursery.run(SCRIPT, [str(run_dir.path), str(folder), *words], folder, EVERY_SAVE)


def alarms(run_dir: RunDir) -> list[dict[str, object]]:
    events = map(json.loads, run_dir.session_events(0).read_text().splitlines())
    return [event for event in events if event["event"] == "alarm"]


def test_a_nan_is_told_with_batch_and_tensor_and_stops_before_it_is_saved(
    nursery: Nursery, folder: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "runs" / "nan")
    # Also with sentinels=warn: five saves later no checkpoint without NaN would be left.
    ended = run(nursery, folder, run_dir, "nan:8", "sentinels=warn")
    assert ended.code == 1, ended.output
    (line,) = [line for line in ended.output.splitlines() if line.startswith("[sentinel] WARNING ")]
    assert line.startswith("[sentinel] WARNING step 9: loss is nan; its windows: ")
    assert "; first bad tensor: all 52 weights, by an update with it" in line
    (event,) = alarms(run_dir)
    assert event["alarm"] == "not-finite" and line.endswith(str(event["text"]))
    newest = max(run_dir.checkpoints.glob("step-*"))
    assert newest.name == "step-00000006", "neither the step of the fault nor a later one was saved"
    assert all(math.isfinite(float(weight.sum())) for weight in load_file(newest / "model.safetensors").values())


def test_after_a_kill_every_step_is_in_the_curves_once_and_no_alarm_was_raised(
    nursery: Nursery, folder: Path, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "runs" / "killed")
    killed = run(nursery, folder, run_dir, "kill:11")
    assert killed.code == -signal.SIGKILL, killed.output
    assert "WARNING" not in killed.output
    ended = run(nursery, folder, run_dir, "none")
    assert ended.code == 0, ended.output
    assert "resuming from step-00000009" in ended.output
    assert alarms(run_dir) == []
    steps = list(range(1, 15))
    reader = EventAccumulator(str(run_dir.tensorboard))
    reader.Reload()
    assert [event.step for event in reader.Scalars("loss")] == steps
    in_files = [
        event.step
        for path in event_files(run_dir.tensorboard)
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == "loss"
    ]
    assert in_files == steps, "no reader finds a step twice, however simple it is"
    known = {line["step"]: line["loss"] for line in metrics(run_dir) if "loss" in line}
    assert {event.step: event.value for event in reader.Scalars("loss")} == pytest.approx(known, rel=1e-6)
    assert len(metrics(run_dir)) > len(steps), "the kill fell between two saves, so steps were done twice"


def metrics(run_dir: RunDir) -> list[dict[str, float]]:
    return [json.loads(line) for line in run_dir.metrics(0).read_text().splitlines()]


def test_where_a_save_came_between_a_ruin_and_its_alarm_the_next_command_goes_back_behind_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "ruined")
    for step in (3, 6, 9):
        (run_dir.checkpoints / f"step-{step:08d}").mkdir(parents=True)

    assert next_commands(run_dir, "failed", 9) == ["jackline resume ruined --step 6", "jackline why ruined"]
    assert next_commands(run_dir, "failed", 10) == ["jackline resume ruined", "jackline why ruined"]
    assert next_commands(run_dir, "failed", 2) == ["jackline resume ruined", "jackline why ruined"]

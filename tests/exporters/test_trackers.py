"""Trackers by their own packages, where these are installed; none is a dependency of Jackline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import HANGS_S

GOLDEN = Path(__file__).parents[1] / "golden"
NUM_STEPS = 30


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    shutil.copytree(GOLDEN / "format1-finished", folder / "format1-finished")
    # Killed after step 20, resumed from step 14.
    rows = [{"step": step, "at_s": 1794000000.0 + step, "loss": 1 / step} for step in (*range(1, 21), *range(15, 31))]
    (folder / "format1-finished" / "metrics-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def send(runs: Path, target: str, **env: str) -> str:
    command = [sys.executable, "-m", "jackline", "send", "format1-finished", "--runs-dir", str(runs), "--to", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done.stderr


def has(name: str) -> bool:
    return bool(subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode == 0)


def test_a_tracker_that_is_not_installed_is_named(runs: Path) -> None:
    if has("wandb"):
        pytest.skip("wandb is installed here")
    command = [sys.executable, "-m", "jackline", "send", "format1-finished", "--runs-dir", str(runs), "--to", "wandb"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "error: sending to wandb needs the package 'wandb', which is not installed here\nhint: pip install wandb\n",
    )


def test_wandb_without_a_key_writes_files_and_never_asks(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed here (pip install wandb)")
    env = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": ""}
    assert "in all 30 reports" in send(runs, "wandb:mine", **env)
    assert "sent 0; in all 30 reports" in send(runs, "wandb:mine", **env)
    assert list((runs / "format1-finished" / "exports" / "wandb").glob("offline-run-*"))


def test_mlflow_has_each_step_once_even_when_our_record_is_lost(runs: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed here (pip install mlflow-skinny)")
    env = {"MLFLOW_ALLOW_FILE_STORE": "true"}
    target = f"mlflow:file://{tmp_path}/mlruns"
    send(runs, target, **env)
    shutil.rmtree(runs / "format1-finished" / "exports")
    assert "sent 0;" in send(runs, target, **env)
    os.environ.update(env)
    client = mlflow.tracking.MlflowClient(tracking_uri=target.removeprefix("mlflow:"))
    experiment = client.get_experiment_by_name("jackline")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [entry.step for entry in history] == list(range(1, NUM_STEPS + 1))
    assert found.info.status == "FINISHED"


def test_trackio_has_each_step_once(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed here (pip install trackio)")
    import sqlite3

    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    send(runs, "trackio:mine", **env)
    send(runs, "trackio:mine", **env)
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        steps = [row[0] for row in database.execute("select step from metrics order by step")]
    assert steps == list(range(1, NUM_STEPS + 1))

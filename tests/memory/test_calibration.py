"""What a rehearsal measured corrects the next plan for the same GPU, and the plan says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jackline.memory.__main__ import choose, main
from jackline.memory.plan.calibration import Calibration, calibration_of, note_measured
from jackline.memory.plan.choose import Plan, plan, room_of
from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.plan.target import Candidate, load_candidates
from jackline.memory.predict.job import StepOptions
from jackline.models.shapes import GPTShape
from tests.memory.jobs import gpt_job

L4 = GPU_MODELS["L4"]
SHAPE = GPTShape(2, 2, 64, context=64, vocab_size=997)
JOB = gpt_job(SHAPE, length=64, global_batch=16)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "jackline" / "measured"


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(JOB, L4)


def known(job: str = JOB.name, options: StepOptions = JOB.options, gpu: Any = L4) -> Calibration:
    return calibration_of(gpu, job, options)


def test_the_next_plan_has_the_figures_that_were_measured(made: Plan) -> None:
    assert known() == Calibration()
    note_measured(made, 1.10, 0.5)
    _, again = choose([Candidate(JOB, {})], L4, room_of(L4), is_calibrated=True)
    assert again.prediction.peak_allocated_bytes == int(made.prediction.peak_allocated_bytes * 1.10)
    assert again.time is not None and made.time is not None
    assert again.time.seconds == pytest.approx(made.time.seconds * 0.5)
    assert again.time.error == 0.15
    assert again.notes[-1] == (
        f"calibrated: this training was measured 1 time on {L4.name} here"
        " (memory +10.0%, time of a step -50% against the bare prediction)"
    )
    _, bare = choose([Candidate(JOB, {})], L4, room_of(L4))
    assert bare.prediction == made.prediction


def test_the_largest_of_the_last_measurements_counts_for_memory(made: Plan) -> None:
    for memory, time in ((1.5, 1.0), (0.9, 1.0), (1.2, 3.0), (1.1, 2.0), (1.0, 2.0), (1.0, 2.0)):
        note_measured(made, memory, time)
    assert (known().memory, known().time) == (1.2, 2.0)  # five are kept


def test_another_gpu_precision_or_training_is_not_corrected(made: Plan) -> None:
    note_measured(made, 1.3, 1.3)
    assert known(gpu=GPU_MODELS["H100"]) == known("another") == known(options=StepOptions("fp32")) == Calibration()


def test_three_other_trainings_correct_the_time_alone(made: Plan) -> None:
    for name, ratio in (("one", 0.7), ("two", 0.8), ("three", 0.9)):
        assert known("another") == Calibration()
        note_measured(replace(made, job=name), 1.3, ratio)
    assert known("another") == Calibration(1.0, 0.8, f"3 other trainings were measured on {L4.name} here")


@pytest.mark.parametrize("text", ["", "[]", '{"job": 3}', '{"memory_ratios": ["x", 1e9, null], "job": "gpt"}', "{"])
def test_a_damaged_file_counts_as_absent(made: Plan, state: Path, text: str) -> None:
    note_measured(made, 1.3, 1.3)
    (place,) = state.glob("*.json")
    place.write_text(text)
    assert known() == Calibration()
    note_measured(made, 1.2, None)
    assert known().memory == 1.2


def test_a_state_folder_that_cannot_be_used_costs_only_the_calibration(made: Plan, state: Path) -> None:
    state.parent.parent.joinpath("jackline").write_text("in the way")
    note_measured(made, 1.3, 1.3)
    assert known() == Calibration()


def test_the_command_says_that_it_is_calibrated(
    tmp_path: Path, made: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n"
        "    return nn.Linear(64, 64), torch.zeros(4, 64), lambda model, batch: model(batch).sum()\n"
    )
    request = json.dumps({"target": f"{tmp_path}/mine.py:make", "gpu": "L4", "words": [], "output": "json"})
    assert main([request]) == 0
    first = json.loads(capsys.readouterr().out)
    (found,) = load_candidates(f"{tmp_path}/mine.py:make", L4, [])
    note_measured(plan(found.job, L4), 1.2, 1.5)
    assert main([request]) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["peak_allocated_bytes"] == pytest.approx(1.2 * first["peak_allocated_bytes"], rel=0.001)
    assert second["notes"][-1].startswith("calibrated: this training was measured 1 time on L4 here")

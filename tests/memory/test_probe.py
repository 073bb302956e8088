"""A model that cannot be traced is measured instead; on the CPU here, as on a GPU elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from jackline.errors import UsageError
from jackline.memory.plan.choose import Room, plan
from jackline.memory.plan.gpus import GpuModel
from jackline.memory.plan.probe import measure_plan, plan_by_measuring
from jackline.memory.plan.target import job_of, load_candidates
from jackline.memory.predict.job import StepOptions
from jackline.memory.predict.step import CannotTrace
from tests.memory.injected import OutOfMemoryAt

MIB = 2**20
CARD = GpuModel("test", 64 * MIB, 80, 0)


class ReadsItsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))

    def forward(self, value: Tensor) -> Tensor:
        if value.is_meta:
            raise RuntimeError("this model needs real values")
        out = self.layers(value)
        kept = out[out.abs().sum(dim=(1, 2)) >= 0]  # how many rows are kept is known only by computing
        return kept.pow(2).sum() * float(kept.shape[0] > 0)


def job_with(global_batch: int) -> object:
    return job_of(ReadsItsValues(), torch.randn(2, 16, 256), global_batch=global_batch, options=StepOptions("fp32"))


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_gets_a_measured_plan() -> None:
    job = job_with(4096)
    with pytest.raises(CannotTrace):
        plan(job, CARD)
    room = Room(40 * MIB, margin=0.0)
    made = plan_by_measuring(job, CARD, device="cpu", room=room)
    assert made.fit == "fits"
    assert 8 < made.micro_batch < 4096
    assert made.prediction.peak_allocated_bytes <= 40 * MIB
    # Close to the room: one more eighth would not have fitted.
    assert made.prediction.peak_allocated_bytes > 35 * MIB
    assert sum(made.parts().values()) == made.device_bytes


def test_a_step_that_fails_in_the_trial_is_tried_smaller() -> None:
    job = job_with(64)
    with OutOfMemoryAt(max_rows=20 * 16) as injected:
        made = plan_by_measuring(job, CARD, device="cpu", room=Room(64 * MIB, margin=0.0))
    assert injected.num_raised > 0
    assert (made.fit, made.max_micro_batch <= 20, made.micro_batch > 10) == ("fits", True, True)


def test_a_model_that_never_fits_is_a_no() -> None:
    made = plan_by_measuring(job_with(8), CARD, device="cpu", room=Room(MIB, margin=0.0))
    assert (made.fit, made.max_micro_batch, made.micro_batch) == ("no", 0, 1)


MINE = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
    return model, torch.zeros(64, 256), lambda model, batch: model(batch).pow(2).sum()

def training():
    model = nn.Linear(256, 512)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(n):
        model(torch.randn(n, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return step
"""


@pytest.mark.parametrize("name", ["make", "training"])
def test_a_planned_step_is_run_and_compared(name: str, tmp_path: Path) -> None:
    """The model was built without values; the step needs what was predicted, beside what the CPU's kernels do."""
    (tmp_path / "mine.py").write_text(MINE)
    (candidate,) = load_candidates(f"{tmp_path / 'mine.py'}:{name}", CARD, ["precision=fp32"])
    made = plan(candidate.job, CARD)
    seen = measure_plan(candidate.job, made, device="cpu")
    assert seen is not None
    assert seen.num_steps >= 3 and seen.step_s > 0
    assert 0 < seen.allocated_bytes < 2 * made.prediction.peak_allocated_bytes
    assert made.prediction.peak_allocated_bytes < 60 * MIB


def test_an_optimizer_that_is_not_run_cannot_be_measured(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    words = ["precision=fp32", "optimizer=adamw8bit"]
    (candidate,) = load_candidates(f"{tmp_path / 'mine.py'}:make", CARD, words)
    with pytest.raises(UsageError) as error:
        measure_plan(candidate.job, plan(candidate.job, CARD), device="cpu")
    assert error.value.message == "--measure runs AdamW on one GPU"

"""Any module and an example batch can be planned; what cannot is an error that says what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from jackline.errors import UsageError
from jackline.memory.__main__ import choose
from jackline.memory.plan.choose import Room, plan
from jackline.memory.plan.explain import fit_table
from jackline.memory.plan.gpus import GPU_MODELS, GpuModel
from jackline.memory.plan.target import Candidate, job_of, load_candidates
from jackline.memory.predict.job import StepOptions
from jackline.models.shapes import GPTShape
from tests.memory.jobs import gpt_job

MIB = 2**20
CARD = GPU_MODELS["L4"]

MINE = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    batch = (torch.zeros(6, 32), torch.zeros(6, dtype=torch.long))
    return model, batch, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])

def real_values():
    weights = torch.zeros(3)
    if weights.tolist() != [0, 0, 0]:
        raise ValueError
    return nn.Linear(4, 1), torch.zeros(2, 4), lambda model, batch: model(batch).sum()

def wrong():
    return "a model"
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_function_in_a_file_is_planned(mine: Path) -> None:
    (found,) = load_candidates(f"{mine}:make", CARD, ["batch_size=24", "precision=fp32"])
    assert found.shown == {"parameters": 32 * 64 + 64 + 640 + 10, "batch_size": 24}
    made = plan(found.job, CARD)
    assert (made.job, made.fit, made.micro_batch, made.options.precision) == ("mine.py:make", "fits", 24, "fp32")


def test_a_function_that_needs_values_is_called_again_with_some(mine: Path) -> None:
    (found,) = load_candidates(f"{mine}:real_values", CARD, [])
    assert plan(found.job, CARD).micro_batch == 2


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        ("none", [], "{mine} has no function 'none'"),
        ("wrong", [], "{mine}:wrong returned str, which cannot be planned"),
        ("make", ["lr=1"], "unknown setting 'lr' for {mine}:make"),
        ("make", ["precision=int8"], "precision is one of fp32, bf16, fp16, bf16-weights, bf16-pure, not 'int8'"),
    ],
)
def test_what_cannot_be_planned_is_a_usage_error(mine: Path, name: str, words: list[str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_candidates(f"{mine}:{name}", CARD, words)
    assert caught.value.message == text.format(mine=mine)


def test_a_file_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(UsageError) as caught:
        load_candidates("./nowhere.py:make", CARD, [])
    assert str(caught.value) == "error: there is no file './nowhere.py'\nhint: jackline plan train.py:make_model"


class ReturnsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, *, value: torch.Tensor) -> dict[int, torch.Tensor]:
        return {0: self.layer(value).sum()}


def test_a_library_call_takes_any_module_and_leaves_it_alone() -> None:
    model = ReturnsItsLoss()
    before = model.layer.weight.clone()
    job = job_of(model, {"value": torch.zeros(5, 8)}, options=StepOptions("fp32"))
    made = plan(job, CARD)
    assert (job.global_batch, made.micro_batch, made.fit) == (5, 5, "fits")
    assert torch.equal(model.layer.weight, before)
    assert model.layer.weight.grad is None


SIZES = {
    "large": GPTShape(4, 4, 128, context=64, vocab_size=997),
    "little": GPTShape(1, 2, 16, context=64, vocab_size=97),
}


def test_auto_takes_the_largest_size_that_is_not_cut_into_many_slices() -> None:
    found = [Candidate(gpt_job(shape, length=64, global_batch=16), {"size": name}) for name, shape in SIZES.items()]
    gpu = GpuModel("test", 400 * MIB, 80, 0)
    sizes = {num_mib: choose(found, gpu, Room(num_mib * MIB))[0].shown["size"] for num_mib in (30, 45, 400)}
    assert sizes == {30: "little", 45: "little", 400: "large"}


def test_the_table_says_for_every_gpu_what_a_plan_would_say() -> None:
    gpus = [GpuModel("old", 128 * MIB, 75, 0), GpuModel("small", 98 * MIB, 80, 0), GpuModel("big", 2000 * MIB, 90, 0)]
    jobs = {name: gpt_job(shape, length=64, global_batch=32) for name, shape in SIZES.items()}
    cells = fit_table(jobs, (2, 32), gpus)
    for name, job in jobs.items():
        for gpu in gpus:
            precision = gpu.precision
            made = plan(gpt_job(SIZES[name], length=64, global_batch=32, options=StepOptions(precision)), gpu)
            word = {1: "fits"}.get(made.accumulation, f"at {made.max_micro_batch}")
            assert cells[name, 32, gpu.name] == word, (name, gpu.name)
        assert job.global_batch == 32
    assert cells["large", 32, "small"].startswith("at ")

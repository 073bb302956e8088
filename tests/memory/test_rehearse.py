"""The rehearsal measures and leaves no trace; its figures correct the plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jackline import accelerator
from jackline.memory.plan.choose import MARGIN_AFTER_REHEARSAL, Room, add_evaluation, plan
from jackline.memory.plan.explain import plan_text
from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.plan.rehearse import (
    CpuMeter,
    Peaks,
    Rehearsal,
    compare_with_plan,
    corrected_room,
    correction_of,
    must_plan_again,
    rehearse,
)
from jackline.memory.predict.job import StepOptions
from jackline.memory.predict.step import predict
from jackline.models.gpt import GPT
from jackline.models.shapes import GPTShape
from jackline.rundir.layout import RunDir
from jackline.rundir.records.memory import read_memory, write_memory
from jackline.units import format_bytes
from tests.memory.injected import OutOfMemoryAt
from tests.memory.jobs import gpt_job

SHAPE = GPTShape(2, 4, 64, context=32, vocab_size=211, dropout=0.1)
IDS = torch.randint(0, 211, (6, 32), generator=torch.Generator().manual_seed(0))


def make_run(seed: int = 0) -> tuple[GPT, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: GPT, optimizer: torch.optim.Optimizer) -> str:
    loss = model(IDS, IDS) / IDS.numel()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()


def acts_of(model: GPT, optimizer: torch.optim.Optimizer, tmp_path: Path) -> dict[str, Callable[[], object]]:
    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(IDS, IDS)

    return {
        "step": lambda: (train_step(model, optimizer), random.random()),
        "eval": evaluate,
        "save": lambda: torch.save(model.state_dict(), tmp_path / "proof"),
    }


@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_a_run_with_a_rehearsal_has_the_losses_of_one_without(num_steps_before: int, tmp_path: Path) -> None:
    losses = []
    for has_rehearsal in (True, False):
        model, optimizer = make_run()
        random.seed(3)
        told = [train_step(model, optimizer) for _ in range(num_steps_before)]
        if has_rehearsal:
            result = rehearse(acts_of(model, optimizer, tmp_path), model, optimizer)
            assert list(result.peaks) == ["step", "eval", "save"]
        losses.append([*told, *(train_step(model, optimizer) for _ in range(4)), random.random()])
    assert losses[0] == losses[1]


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    model, optimizer = make_run()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer.param_groups[0]["lr"] = 0.5

    def meddle() -> None:
        train_step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.1

    rehearse({"step": meddle, **acts_of(model, optimizer, tmp_path)}, model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(weight.grad is None for weight in model.parameters())
    assert model.training and all(block.training for block in model.blocks)


def test_the_step_needs_what_was_predicted() -> None:
    shape = GPTShape(2, 4, 64, context=64, vocab_size=997)
    job = gpt_job(shape, length=64, options=StepOptions("fp32", "foreach"))
    predicted = predict(job, 8, GPU_MODELS["H200"], is_accumulating=False)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def two_steps() -> None:
        for _ in range(2):
            job.loss(model, job.batch(8)).backward()
            optimizer.step()
            optimizer.zero_grad()

    measured = rehearse({"step": two_steps}, model, optimizer)
    without_workspace = predicted.peak_allocated_bytes - predicted.parts["workspace"]
    assert measured.allocated_bytes == pytest.approx(without_workspace, rel=0.01)


def test_a_model_on_the_cpu_is_measured_there_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    model, optimizer = make_run()
    measured = rehearse({"step": lambda: train_step(model, optimizer)}, model, optimizer)
    weights = sum(weight.nbytes for weight in model.parameters())
    assert measured.allocated_bytes > 4 * weights


def test_running_out_of_memory_in_the_rehearsal_is_an_answer_and_not_an_error(tmp_path: Path) -> None:
    model, optimizer = make_run()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with OutOfMemoryAt(number=30) as injected:
        result = rehearse(acts_of(model, optimizer, tmp_path), model, optimizer)
    assert injected.num_raised == 1
    assert (result.failed_act, dict(result.peaks)) == ("step", {})
    assert result.error.startswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_any_other_error_in_an_act_is_raised_and_still_leaves_no_trace() -> None:
    model, optimizer = make_run()
    before = model.head.weight.clone()

    def broken() -> None:
        train_step(model, optimizer)
        raise ValueError("a bug in the save")

    with pytest.raises(ValueError, match="a bug in the save"):
        rehearse({"save": broken}, model, optimizer)
    assert torch.equal(model.head.weight, before)


def measured_of(allocated: int, failed_act: str = "") -> Rehearsal:
    return Rehearsal({"step": Peaks(allocated, allocated)}, failed_act)


def test_more_than_three_percent_off_means_a_new_plan() -> None:
    predicted = predict(gpt_job(SHAPE, length=32), 2, GPU_MODELS["T4"])
    peak = predicted.peak_allocated_bytes
    for share, expected in ((1.0, False), (1.02, False), (0.98, False), (1.04, True), (0.95, True)):
        measured = measured_of(int(peak * share))
        assert must_plan_again(correction_of(predicted, measured), measured) is expected
    assert must_plan_again(1.0, measured_of(peak, "step"))
    assert correction_of(predicted, Rehearsal({})) == 1.0


def test_the_corrected_room_is_smaller_and_has_less_margin() -> None:
    room = corrected_room(Room(10**10), 1.1)
    assert (room.margin, room.correction, room.gpu_bytes) == (MARGIN_AFTER_REHEARSAL, 1.1, 10**10)
    assert room.budget_bytes == int(10**10 * (1 - MARGIN_AFTER_REHEARSAL) / 1.1)


def test_the_correction_is_kept_in_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_memory(run).usable_correction is None
    predicted = predict(gpt_job(SHAPE, length=32), 2, GPU_MODELS["T4"])
    write_memory(run, compare_with_plan(predicted, measured_of(int(predicted.peak_allocated_bytes * 1.25))))
    assert read_memory(run).usable_correction == pytest.approx(1.25, rel=1e-6)
    run.memory_file.write_text('{"correction": "much"}')
    assert read_memory(run).usable_correction is None


def test_an_evaluation_needs_what_was_predicted() -> None:
    """Beside the weights and the optimizer's state; without gradients nothing is kept for a backward pass."""
    shape = GPTShape(2, 4, 64, context=64, vocab_size=997)
    job = gpt_job(shape, length=64, options=StepOptions("fp32"))
    gpu = GPU_MODELS["L4"]
    made = add_evaluation(job, plan(job, gpu))
    model = GPT(shape)
    weights_bytes = sum(weight.nbytes for weight in model.parameters())
    assert made.state_bytes == pytest.approx(3 * weights_bytes, rel=0.01)

    def evaluate() -> None:
        with torch.no_grad():
            job.loss(model.eval(), job.batch(made.micro_batch))

    measured = CpuMeter([*model.parameters(), *model.buffers()]).measure(evaluate)
    workspace = gpu.workspace_bytes + 2**20  # of cuBLAS, and of cuBLASLt for products with a bias
    assert made.evaluation_bytes == pytest.approx(
        measured.allocated_bytes + made.state_bytes - weights_bytes + workspace, rel=0.01
    )
    assert made.evaluation_bytes < made.prediction.peak_allocated_bytes
    assert f"  evaluation: {format_bytes(made.evaluation_bytes)} allocated" in plan_text(made, {})

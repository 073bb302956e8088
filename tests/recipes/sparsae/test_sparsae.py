"""The sparse recipe as real processes: sparse to the last weight, and killed it ends as it would have ended."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from jackline.recipes.sparsae import memory as sparsae_memory
from jackline.recipes.sparsae.mask_sampling import unpack
from jackline.recipes.sparsae.memory import distilled, divergence_sum, teachers
from jackline.recipes.sparsae.method import BurnIn, distill_weight
from jackline.recipes.sparsae.recipe import SparsaeConfig
from jackline.trainer.config import resolve
from tests.session.nursery import Nursery
from tests.trainer.test_loop import Trainings

WORDS = ("batch_size=2", "mask_opt_every=3", "distill_warmup=4", "eval_every=6", "lr=1e-3")


@pytest.fixture
def trainings(nursery: Nursery, corpus: Path, tmp_path: Path) -> Trainings:
    return Trainings(nursery, corpus, tmp_path)


def checkpoint(trainings: Trainings, name: str) -> Path:
    return max(trainings.run_dir(name).checkpoints.glob("step-*"))


def parts_of(trainings: Trainings, name: str) -> dict[str, bytes]:
    folder = checkpoint(trainings, name)
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize(
    "method", ["es", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rigl", "set", "static"))]
)
def test_killed_between_mask_updates_it_ends_bit_equal_and_sparse(method: str, trainings: Trainings) -> None:
    words = (*WORDS, f"mask_update={method}")
    trainings.finish("whole", *words, RECIPE="sparsae")
    ended = trainings.run("killed", *words, KILL_AT="8", RECIPE="sparsae")
    assert ended.code == -signal.SIGKILL, ended.output
    ended = trainings.finish("killed", *words, RECIPE="sparsae")
    assert "resuming from step-" in ended.output, ended.output
    whole, killed = parts_of(trainings, "whole"), parts_of(trainings, "killed")
    assert {f"{name}.safetensors" for name in ("model", "optimizer", "teacher", "mask_search")} <= set(whole)
    assert {name for name in whole if whole[name] != killed[name]} == set()
    _check_sparsity(checkpoint(trainings, "whole"))
    _check_records(trainings, method)


def _check_sparsity(folder: Path) -> None:
    """Exactly four fifths of all matrix weights are zero."""
    model = load_file(folder / "model.safetensors")
    masks = load_file(folder / "mask_search.safetensors")
    active = total = 0
    for name, weight in model.items():
        if weight.dim() < 2:
            continue
        packed = next(value for key, value in masks.items() if key.endswith(name))
        mask = unpack(packed, weight.shape)
        assert not weight[~mask].any(), name
        active, total = active + int(torch.count_nonzero(mask)), total + weight.numel()
    assert active == round(0.2 * total)


def _check_records(trainings: Trainings, method: str) -> None:
    """Each update once, also in the run that did one of them twice."""
    for name in ("whole", "killed"):
        records = [
            json.loads(line) for line in (trainings.run_dir(name).path / "masks.jsonl").read_text().splitlines()
        ]
        per_update = {"es": 4, "static": 0}.get(method, 1)
        assert [record["update"] for record in records] == [n for n in range(4) for _ in range(per_update)]
        assert sum(record["is_taken"] for record in records) == (4 if per_update else 0)


@pytest.mark.slow
def test_dense_means_that_nothing_is_switched_off_and_no_mask_is_searched(trainings: Trainings) -> None:
    ended = trainings.finish("dense", *WORDS, "sparsity=0", "max_steps=4", RECIPE="sparsae")
    assert "mask update" not in ended.output
    model = load_file(checkpoint(trainings, "dense") / "model.safetensors")
    assert all(torch.count_nonzero(weight) > 0.99 * weight.numel() for weight in model.values() if weight.dim() >= 2)


def test_the_teacher_is_not_asked_before_its_time_and_less_and_less_after_it() -> None:
    config = resolve("sparsae", []).config
    assert isinstance(config, SparsaeConfig)
    found = [distill_weight(step, config, 10_000) for step in (0, 499, 500, 4000, 7500, 9999)]
    assert found[:3] == [0.0, 0.0, 0.5]
    assert found[3] == pytest.approx(0.3, abs=1e-9)
    assert found[4:] == [pytest.approx(0.1), pytest.approx(0.1)]


def test_burn_in_stretches_what_an_update_did_to_new_connections_alone() -> None:
    burn_in = BurnIn(steps=5, most=1.5)
    weights = {"w": torch.zeros(2, 3)}
    burn_in.left, burn_in.places = 5, {"w": torch.tensor([1, 4])}
    moved = []
    for _ in range(7):
        burn_in.before(weights)
        weights["w"] += 1.0
        copies = {"w": weights["w"].to(torch.bfloat16)}
        before = weights["w"].clone()
        burn_in.after(weights, copies)
        moved.append((weights["w"] - before).flatten()[1].item() + 1.0)
        assert weights["w"][0, 0] == before[0, 0]
        assert torch.equal(copies["w"].flatten()[[1, 4]], weights["w"].flatten()[[1, 4]].to(torch.bfloat16))
    assert [round(value, 6) for value in moved] == [1.1, 1.2, 1.3, 1.4, 1.5, 1.0, 1.0]
    assert math.isclose(float(weights["w"][1, 1]), sum(moved), rel_tol=1e-6)


def test_a_loss_that_keeps_little_is_the_plain_one_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    teacher, logits = 3 * torch.randn(2, 75, 501), torch.randn(2, 75, 501, requires_grad=True)
    targets = torch.randint(0, 501, (2, 75))
    targets[0, :3] = -100  # such rows count for the divergence alone

    def run(is_lean: bool) -> tuple[Tensor, ...]:
        monkeypatch.setattr(sparsae_memory, "keeps_little", lambda logits: is_lean)
        found = distilled(teachers(teacher.clone()), logits * 1.0, targets, 0.37)
        return (*found, *torch.autograd.grad(found[0] / 7, logits))

    for lean, plain in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(lean, plain, rtol=1e-5, atol=1e-6)
    first, second = run(True), run(True)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_divergence_and_its_gradients_are_kl_divs_to_the_bit() -> None:
    torch.manual_seed(0)
    teacher = functional.log_softmax(3 * torch.randn(30, 501), dim=-1)
    logits, targets = torch.randn(30, 501, requires_grad=True), torch.randint(0, 501, (30,))

    def run(divergence: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        student = functional.log_softmax(logits, dim=-1)
        loss, found = functional.nll_loss(student, targets, reduction="sum"), divergence(student)
        [gradient] = torch.autograd.grad(loss + 0.37 * found, logits)
        return found.detach(), gradient

    plain = run(lambda student: functional.kl_div(teacher, student, log_target=True, reduction="sum"))
    ours = run(lambda student: divergence_sum(teacher.clone(), student))
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))

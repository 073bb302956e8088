"""What the memory plan of the sparse recipe counts is what its trainer keeps, in each precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from jackline.memory.plan.gpus import find_gpu
from jackline.memory.predict.step import trace_step
from jackline.memory.predict.trace import Recorder, Trace
from jackline.recipes.sparsae import memory as sparsae_memory
from jackline.recipes.sparsae.memory import SparsaeModule
from jackline.recipes.sparsae.method import SparseAdditions
from jackline.recipes.sparsae.recipe import DISTILL_WEIGHT
from jackline.trainer.build import build_language
from jackline.trainer.config import resolve
from jackline.trainer.language import LanguageTask
from jackline.trainer.report.console import Console

pytestmark = pytest.mark.xdist_group("sparse_memory")  # one task of each precision
LARGE = 1024  # bytes: what is smaller is a number on its way to the log


@pytest.fixture(scope="module", params=["bf16-weights", "fp32"])
def task(
    request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LanguageTask]:
    words = ["--quick", "seq_len=16", "batch_size=2", "max_steps=3", "val_fraction=0.2", f"data={corpus / 'text'}"]
    words += [f"precision={request.param}", f"data_dir={corpus / 'data'}"]
    made = build_language(resolve("sparsae", words).config, Console(), tmp_path_factory.mktemp("run"))
    yield made
    made.close()


def num_bytes(tensors: Iterator[Tensor]) -> int:
    """A tied weight once."""
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def planned(trace: Trace, part: str) -> int:
    return sum(made.num_bytes for made in trace.allocations if made.part == part)


def test_weights_teacher_masks_masters_and_moments_are_planned_as_they_are_kept(task: LanguageTask) -> None:
    additions = cast(SparseAdditions, task.additions)
    job = task.config.memory_job(task.shape, task.learner.precision)
    assert job is not None
    trace = trace_step(job, 1, find_gpu("A100-40"), job.options)

    kept = num_bytes(task.learner.model.parameters()) + num_bytes(additions.teacher.parameters())
    assert planned(trace, "weights") == kept + num_bytes(iter(additions.search.masks.on.values()))
    moved = [weight for group in task.learner.optimizer.param_groups for weight in group["params"]]
    for weight in moved:
        weight.grad = torch.zeros_like(weight)
    task.learner.optimizer.step()
    state = [tensor for weight in moved for tensor in task.learner.optimizer.state[weight].values()]
    assert planned(trace, "optimizer") == num_bytes(iter(state))


@pytest.mark.parametrize("is_lean", [False, True])  # as on a GPU, which plans are for, and as on this CPU
def test_the_planned_step_makes_and_frees_the_trainers_tensors_in_the_trainers_order(
    task: LanguageTask, is_lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparsae_memory, "keeps_little", lambda logits: is_lean)
    additions = cast(SparseAdditions, task.additions)
    additions._alpha = DISTILL_WEIGHT
    tokens = torch.randint(0, task.shape.vocab_size, (2, 17))
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    module = SparsaeModule(task.learner.model, additions.teacher, DISTILL_WEIGHT)  # type: ignore[arg-type]

    trained = _lives(task, lambda: task.loss_sum(tokens)[0])
    assert _lives(task, lambda: module(ids, targets)) == trained


def _lives(task: LanguageTask, step: Callable[[], Tensor]) -> tuple[float, list[int]]:
    """The loss, and every large storage that a step makes (its bytes) and frees (minus its bytes)."""
    task.learner.optimizer.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with Recorder("cpu") as recorder:
        loss = step()
        torch.autograd.backward(loss)
    trace = recorder.finish()
    sizes = [made.num_bytes for made in trace.allocations]
    signed = [sizes[event] if event >= 0 else -sizes[~event] for event in trace.events]
    return float(loss.detach()), [size for size in signed if abs(size) >= LARGE]

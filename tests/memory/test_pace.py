"""Time, money and several GPUs: sentences and numbers of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jackline.errors import UsageError
from jackline.memory.plan.choose import Plan, plan
from jackline.memory.plan.explain import plan_json, plan_text
from jackline.memory.plan.gpus import GpuModel, find_gpu
from jackline.memory.plan.pace import Until
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import trace_step
from jackline.units import parse_price
from tests.memory.test_values import Experts

MIB = 2**20


def job(global_batch: int = 64, **options: object) -> Job:
    return Job(
        "mine",
        lambda _: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))),
        lambda n: torch.zeros(n, 512),
        lambda model, x: model(x).sum(),
        global_batch,
        StepOptions("bf16", **options),  # type: ignore[arg-type]
    )


def made(gpu: str = "A100-80", **options: object) -> Plan:
    return plan(job(**options), find_gpu(gpu))


@pytest.mark.parametrize(("text", "price"), [("2.1/h", 2.1), ("2.1", 2.1), ("$3/h", 3.0), ("0.5 EUR/h", 0.5)])
def test_a_price_is_read_as_people_write_it(text: str, price: float) -> None:
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["cheap", "", "/h", "-1", "nan", "2.5/week"])
def test_a_price_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_price(text)


def test_time_and_cost_are_printed_with_their_range() -> None:
    told = plan_text(made(), {}, until=Until(steps=2_000_000, price_an_hour=2.0))
    assert " a step takes about " in told and " samples/s" in told
    assert "  2,000,000 steps: about " in told and ", cost " in told
    as_json = plan_json(made(), {}, Until(1800, 2.0))["time"]
    assert as_json["cost"] == pytest.approx(as_json["step_s"])
    low, high = as_json["range_s"]
    assert low < as_json["step_s"] < high


def test_more_work_takes_longer_and_a_faster_gpu_less() -> None:
    large = plan(job(2**20), find_gpu("A100-80")).time
    small = plan(job(2**19), find_gpu("A100-80")).time
    fast = plan(job(2**20), find_gpu("H200")).time
    assert large is not None and small is not None and fast is not None
    assert fast.seconds < large.seconds
    assert small.seconds < large.seconds


def test_what_python_starts_in_the_forward_pass_counts_more_than_in_the_backward_pass() -> None:
    """Also where a part of the forward pass runs again in the backward pass."""

    def waiting_us(make: Callable[[], nn.Module]) -> float:
        small = replace(job(4), build=lambda _: make())
        trace = trace_step(small, 4, find_gpu("H200"), small.options, is_accumulating=False)
        return sum(one.start_us for one in trace.work)

    once = waiting_us(lambda: nn.Sequential(*(nn.GELU() for _ in range(32)), nn.Linear(512, 512)))
    again = waiting_us(lambda: Again(nn.Sequential(*(nn.GELU() for _ in range(32)), nn.Linear(512, 512))))
    assert again - once >= 32 * 20.0
    assert once < 2 * 32 * 40.0


class Again(nn.Module):
    """Its activations are computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(self.inner, value.requires_grad_(), use_reentrant=False)
        return made


WEIGHTS = 4 * (512 * 512 + 512) * 4


def test_ranks_share_the_batch_and_keep_buckets() -> None:
    one, two = made(), made("A100-80 x2")
    assert (one.micro_batch, two.micro_batch) == (64, 32)
    assert two.prediction.parts["communication"] == pytest.approx(WEIGHTS, rel=0.01)
    assert "batch 64 = 2 GPUs x micro-batch 32" in plan_text(two, {})
    assert any(note.startswith("figures are for one of 2 DDP ranks, estimated; ") for note in two.notes)


def test_fsdp_ranks_share_weights_gradients_and_state() -> None:
    whole, shared = made(), made("A100-80 x4", parallel="fsdp")
    for part in ("weights", "optimizer"):
        assert shared.prediction.parts[part] == pytest.approx(whole.prediction.parts[part] / 4, rel=0.02)
    assert shared.prediction.parts["communication"] == 4 * WEIGHTS // 4


def test_the_largest_micro_batch_is_told_also_beyond_the_batch() -> None:
    small = plan(job(8), GpuModel("test", 200 * MIB, 80, 0))
    assert small.micro_batch == 8
    assert small.max_micro_batch > 1000
    checked = plan(job(small.max_micro_batch * 2), GpuModel("test", 200 * MIB, 80, 0))
    assert checked.max_micro_batch == pytest.approx(small.max_micro_batch, rel=0.01)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layers(value).sum()


def test_convolutions_get_a_range() -> None:
    images = Job("mine", lambda _: Convolutions(), lambda n: torch.zeros(n, 3, 64, 64), lambda model, x: model(x), 8)
    (note,) = (note for note in plan(images, find_gpu("L4")).notes if "cuDNN" in note)
    assert note.startswith("cuDNN chooses how its convolutions work: ")
    assert " allocated, " in note and note.endswith(" reserved, the rehearsal decides")


def test_a_mixture_of_experts_is_told_with_its_worst_case() -> None:
    experts = Job("mine", lambda _: Experts(), lambda n: torch.zeros(n, 128, 64), lambda model, x: model(x), 8)
    notes = plan(experts, find_gpu("L4")).notes
    assert any(note.startswith("assumed: tokens spread evenly over the experts (test_values.py:") for note in notes)
    assert any(note.startswith("if all tokens chose the same experts: ") for note in notes)

"""Small tensors carry values on the meta device: what a model asks of them is answered, or assumed and said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.predict.cuda_rules import CudaRules, leaf_functions
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.questions import Questions
from jackline.memory.predict.step import trace_step
from jackline.memory.predict.trace import Recorder
from jackline.memory.predict.values import Values

H200 = GPU_MODELS["H200"]


@pytest.fixture
def values() -> Iterator[Values]:
    found = Values()
    with torch.device("meta"), leaf_functions(), Recorder(values=found), CudaRules(), Questions(found):
        yield found


IDS = [[5, 0, 2], [2, 2, 9]]


def length_of_the_longest() -> int:
    mask = torch.tensor(IDS) != 0
    return int(mask.sum(dim=1).max())


def cut_by_a_tensor() -> tuple[int, ...]:
    end = torch.tensor(IDS)[1, 2] - 7
    return tuple(torch.arange(10)[:end].tolist())


def many_questions() -> list[object]:
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, 3:] = 0
    places = torch.arange(6).view(2, 3)
    return [
        bool(mask.all()),
        torch.triu(torch.ones(4, 4), diagonal=1).bool()[0, 1].item(),
        mask.nonzero().shape[0],
        torch.rand(2, 5)[mask.bool()].shape[0],
        torch.masked_select(places, places > 2).tolist(),
        torch.unique(torch.tensor(IDS)).tolist(),
        torch.bincount(torch.tensor(IDS).flatten()).tolist(),
        torch.where(places == 4)[0].item(),
        torch.repeat_interleave(torch.arange(2), torch.tensor([1, 3])).tolist(),
        [rate.item() for rate in torch.linspace(0, 1, 3)],
        torch.full((2,), 7).cpu().numpy().tolist(),
        places.new_tensor([3, 4]).sum().item(),
        torch.nn.functional.one_hot(torch.tensor([0, 2]), 3).sum(dim=0).tolist(),
        torch.equal(places, places.clone()),
        list(range(torch.tensor(2))),
        torch.arange(torch.tensor(3)).shape[0],
        5 in places,
        places[torch.tensor(1)].tolist(),
        torch.zeros(2).index_put_((torch.tensor([1]),), torch.tensor(3.0)).tolist(),
        torch.stack([torch.tensor(1), torch.tensor(2)]).max().item(),
    ]


@pytest.mark.parametrize("ask", [length_of_the_longest, cut_by_a_tensor, many_questions])
def test_an_answer_is_the_one_that_real_tensors_give(values: Values, ask: Callable[[], Any]) -> None:
    answered = ask()
    assert not values.notes
    with torch.device("cpu"):
        assert answered == ask()


def test_large_tensors_carry_no_values(values: Values) -> None:
    assert not hasattr(torch.zeros(2**20, dtype=torch.long), "_jackline_value")
    assert not hasattr(torch.zeros(2**13), "_jackline_value")


def test_a_value_is_forgotten_when_something_unknown_is_written(values: Values) -> None:
    known = torch.zeros(3)
    known += torch.rand(2**14)[:3]
    assert known.sum().item() == 0.0
    assert list(values.notes) == [next(iter(values.notes))]
    assert "a value that is read is 0 (test_values.py:" in next(iter(values.notes))


def test_an_unknown_mask_selects_everything_and_says_so(values: Values) -> None:
    large = torch.rand(100, 200)
    assert large[large > 0.5].shape == (20_000,)
    assert (large > 0.5).nonzero().shape == (20_000, 2)
    assert torch.masked_select(large, large > 2).shape == (20_000,)
    assert all("an unknown mask selects everything (test_values.py:" in note for note in values.notes)


def test_nobody_is_told_of_padding_or_infinities_that_are_not_there(values: Values) -> None:
    large = torch.rand(100, 200)
    assert not torch.isinf(large).any()
    assert (large > 0).all()


class Experts(nn.Module):
    """A mixture of experts as most libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        tokens = value.flatten(0, 1)
        weights, chosen = torch.topk(self.router(tokens).softmax(-1), 2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.sum()


def test_tokens_are_spread_evenly_over_experts_or_all_to_one() -> None:
    job = Job(
        "mine",
        lambda _: Experts(),
        lambda n: torch.zeros(n, 128, 64),
        lambda model, x: model(x),
        8,
        StepOptions("fp32"),
    )
    even = trace_step(job, 4, H200, job.options)
    one_sided = trace_step(job, 4, H200, StepOptions("fp32", routing="one-sided"))
    assert even.is_routed and one_sided.is_routed
    assert even.assumptions[0].startswith("tokens spread evenly over the experts (test_values.py:")
    assert one_sided.assumptions[0].startswith("all tokens to the same experts (test_values.py:")
    rows = {
        size: [one.num_bytes for one in trace.allocations].count(64 * 4 * 512 // size)
        for size, trace in ((2, even), (1, one_sided))
    }
    assert rows[2] > 4 and rows[1] > 2


def test_a_trace_leaves_the_random_numbers_of_the_process_alone() -> None:
    job = Job("mine", lambda _: nn.Linear(4, 4), lambda n: torch.rand(n, 4), lambda model, x: model(x).sum(), 8)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trace_step(job, 2, H200, job.options)
    assert torch.equal(torch.rand(3), expected)


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            wide = self.layer(value)
        assert torch.is_autocast_enabled("cuda")
        return self.layer(value).sum() + wide.sum()


def test_a_model_can_switch_autocast_off_for_a_part() -> None:
    job = Job("mine", lambda _: Casting(), lambda n: torch.rand(n, 64), lambda model, x: model(x), 8)
    trace = trace_step(job, 100, H200, job.options)
    sizes = [made.num_bytes for made in trace.allocations if made.phase == "forward"]
    assert 100 * 64 * 4 in sizes and 100 * 64 * 2 in sizes

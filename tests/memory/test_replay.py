"""A step that is done again: the verdict on a planted fault, and that a healthy training is left as it is."""

from __future__ import annotations

from itertools import count, product

import pytest
import torch
from torch import Tensor, nn

from jackline.memory.guard import replay
from jackline.memory.guard.replay import Replay, Replayed, UsualLoss, fingerprint
from jackline.memory.guard.safe_step import SafeStep
from tests.memory.replay_cases import BAD, train, wrong, wrong_late


@pytest.mark.parametrize("seed", range(5))
def test_a_flipped_bit_and_a_bad_batch_are_told_apart(seed: int) -> None:
    """One of five models a seed; `scripts/torture replay` runs hundreds."""
    for plant in ("flip", BAD[seed % len(BAD)]):
        assert not wrong(seed, plant, train(seed, plant))


@pytest.mark.parametrize("seed", range(10, 15))
def test_a_flip_that_no_replay_met_is_not_blamed_on_the_next_batch(seed: int) -> None:
    assert not wrong_late(seed, train(seed, "exponent", every=1000))


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_training_ends_with_the_same_bits_with_and_without_replays(seed: int) -> None:
    with_it, without = train(seed, "", every=3), train(seed, "", is_on=False)
    assert not with_it.told and with_it.num_agreed >= 13
    assert all(torch.equal(one, other) for one, other in zip(with_it.weights, without.weights, strict=True))


def test_the_gradients_that_agree_are_used_after_a_flip() -> None:
    flipped, clean = train(3, "flip"), train(3, "", steps=40)
    assert [one.verdict for one in flipped.told] == ["hardware or race"]
    assert "runs agree: hardware or race, not the data" in flipped.told[0].text
    # The plant draws from a generator of its own, so both trainings see the same data.
    assert all(torch.equal(one, other) for one, other in zip(flipped.weights, clean.weights, strict=True))


def test_a_step_without_determinism_cannot_be_told() -> None:
    """Said once at the beginning, and again with what is known when a loss is strange."""
    told: list[Replayed] = []
    model, noise = nn.Linear(2, 1), count(1)
    safe = SafeStep(model)
    safe.replay = Replay(1, told.append)

    def loss(part: Tensor) -> tuple[Tensor, int]:
        return (model(part) + 1e-3 * next(noise)).square().sum(), len(part)  # a state that no RNG holds

    for step in range(30):
        safe.step = step
        model.zero_grad()
        safe(loss, torch.ones(4, 2) * (1e6 if step == 28 else 1))
    assert [one.verdict for one in told] == ["cannot tell", "cannot tell"] and [one.step for one in told] == [1, 28]
    assert "exact=True asks for deterministic kernels" in told[0].text
    assert told[1].text.startswith("loss ") and "gives other gradients each time (its loss was" in told[1].text


def test_a_function_that_reads_the_batch_in_hand_is_not_asked_about_the_one_before() -> None:
    """Its loss of an older batch would be nonsense; then the text says less, and nothing crashes."""
    told: list[Replayed] = []
    torch.manual_seed(0)
    model, held = nn.Linear(2, 1), {}
    safe = SafeStep(model)
    safe.replay = Replay(1000, told.append)
    for step in range(24):
        given = torch.randn(4 + step, 2)
        held["wanted"] = torch.zeros(4 + step, 1) + (1e6 if step == 23 else 0)
        safe.step = step
        model.zero_grad()
        safe(lambda part: ((model(part) - held["wanted"]).square().sum(), len(part)), given)
    assert [one.verdict for one in told] == ["data or mathematics"]
    assert told[0].text.endswith("data or mathematics, in this batch or in an update before it")


def test_what_is_usual_and_what_is_far_above_it() -> None:
    usual = UsualLoss()
    for number in range(40):
        assert not usual.why_strange(3.0 + 0.1 * (number % 3))
        usual.add(3.0 + 0.1 * (number % 3), "")
    assert usual.why_strange(4.4) == "" and usual.why_strange(4.8) == "jump"
    assert usual.why_strange(float("nan")) == usual.why_strange(float("inf")) == "not finite"
    rare = UsualLoss()  # a small batch: most losses near 0.6, some far above
    for value in (0.6, 0.5, 0.7, 0.6, 0.5, 0.7, 1.8, 0.6) * 3:
        rare.add(value, rare.why_strange(value))
    assert rare.why_strange(2.2) == "" and rare.why_strange(3.2) == "jump"
    again = UsualLoss()
    again.load(usual.state())
    assert again.state() == usual.state() and again.why_strange(4.8) == "jump"
    for _ in range(40):  # what lasts becomes the usual
        again.add(9.0, again.why_strange(9.0))
    assert again.why_strange(9.5) == ""
    again.load({"losses": None})
    assert again.middle is None and again.why_strange(1e9) == ""


def test_a_fingerprint_sees_every_bit_and_every_kind_of_gradient() -> None:
    model = nn.Linear(3, 2)
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        model = nn.Linear(3, 2).to(kind)
        model.weight.grad = torch.randn(2, 3, dtype=kind).t().contiguous().t()  # not contiguous
        before = fingerprint([model])
        bits = model.weight.grad.view({4: torch.int32, 2: torch.int16, 8: torch.int64}[model.weight.element_size()])
        bits[1, 2] ^= 1
        assert fingerprint([model]) != before
        bits[1, 2] ^= 1
        assert fingerprint([model]) == before
    words = nn.Embedding(5, 2, sparse=True)
    words(torch.tensor([1, 1, 3])).sum().backward()
    assert len(fingerprint([words])) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_sums_of_a_gpu_tell_each_bit_and_changes_that_cancel_out(dtype: torch.dtype) -> None:
    gradients = [torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype), torch.zeros(4, dtype=dtype)]
    bits = [replay._as_integers(one) for one in gradients]
    before = replay._sums_on_gpu(bits)
    width = 8 * gradients[0].element_size()
    masks = [*(1 << bit for bit in range(width - 1)), -(1 << (width - 1))]
    for number, mask in product(range(2), masks):
        bits[number][2] ^= mask
        assert not torch.equal(replay._sums_on_gpu(bits)[number], before[number])
        bits[number][2] ^= mask
    assert torch.equal(replay._sums_on_gpu(bits), before)
    bits[0][0] += 64
    bits[0][1] -= 64
    after = replay._sums_on_gpu(bits)
    assert after[0, 0] == before[0, 0] and after[0, 1] != before[0, 1]

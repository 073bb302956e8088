"""The GPT: sizes as told, causal, the same loss by every road."""

from __future__ import annotations

import pytest
import torch

from jackline.errors import UsageError
from jackline.models.gpt import GPT
from jackline.models.loss import IGNORED
from jackline.models.shapes import SHAPES, GPTShape, count_parameters, describe_shape, find_shape

SMALL = GPTShape(2, 2, 16, context=12, vocab_size=37)
UNTIED = GPTShape(
    2, 2, 16, context=12, vocab_size=37, is_tied=False, has_head_bias=True, dropout=0.1, activation="relu"
)


@pytest.mark.parametrize("name", SHAPES)
def test_a_size_has_as_many_parameters_as_it_says(name: str) -> None:
    with torch.device("meta"):
        model = GPT(SHAPES[name])
    assert sum(weight.numel() for weight in model.parameters()) == count_parameters(SHAPES[name])


def test_the_sparsae_sizes_are_larger_than_advertised() -> None:
    counts = {name: count_parameters(shape) for name, shape in SHAPES.items() if name.startswith("sparsae")}
    assert counts == {
        "sparsae-tiny": 49_393_489,
        "sparsae-small": 162_497_617,
        "sparsae-medium": 405_550_161,
    }


def test_a_description_says_whether_the_head_is_tied() -> None:
    assert describe_shape("small", SHAPES["small"]) == (
        "small: 12 x 768, 12 heads, context 1024, 124,439,808 parameters, head tied to the embedding"
    )
    assert describe_shape("sparsae-tiny", SHAPES["sparsae-tiny"]).endswith("49,393,489 parameters, head not tied")


def test_an_unknown_size_names_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        find_shape("huge")
    assert str(caught.value) == (
        "error: there is no model size 'huge'\n"
        "hint: known sizes: nano, tiny, small, medium, xl, sparsae-tiny, sparsae-small, sparsae-medium"
    )


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="width 10 is not a multiple of 3 heads"):
        GPTShape(1, 3, 10)


@pytest.mark.parametrize("shape", [SMALL, UNTIED])
def test_a_token_does_not_change_what_was_predicted_before_it(shape: GPTShape) -> None:
    torch.manual_seed(0)
    model = GPT(shape).eval()
    ids = torch.randint(0, 37, (1, 12))
    other = ids.clone()
    other[0, 7] = (other[0, 7] + 1) % 37
    before, after = model(ids), model(other)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def loss_and_gradients(model: GPT, ids: torch.Tensor, targets: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(ids, targets)
    loss.backward()
    return loss.item(), [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def test_recomputing_and_chunks_change_neither_loss_nor_gradients() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    ids = torch.randint(0, 37, (3, 12))
    targets = torch.randint(0, 37, (3, 12))
    targets[1, 4:] = IGNORED
    loss, gradients = loss_and_gradients(model, ids, targets)
    model.is_recomputing, model.loss_chunk_rows = True, 7
    other_loss, other_gradients = loss_and_gradients(model, ids, targets)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for ours, theirs in zip(other_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_sum_over_targets_that_are_not_ignored() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    ids = torch.randint(0, 37, (2, 12))
    targets = torch.full((2, 12), IGNORED)
    targets[0, 3] = 5
    expected = -torch.log_softmax(model(ids)[0, 3], dim=-1)[5]
    torch.testing.assert_close(model(ids, targets), expected)

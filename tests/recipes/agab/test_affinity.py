"""The affinity head: the size it is said to have, numbers that are not rounded away, a loss that cannot overflow."""

from __future__ import annotations

import pytest
import torch

from jackline.recipes.agab.head import AffinityHead, count_parameters, focal_loss


@pytest.mark.parametrize("num_inputs", [2304, 1000, 3])
def test_the_head_has_as_many_parameters_as_it_is_said_to_have(num_inputs: int) -> None:
    assert sum(weight.numel() for weight in AffinityHead(num_inputs).parameters()) == count_parameters(num_inputs)


def test_the_head_over_igt5_and_esm2_has_3_053_057_parameters() -> None:
    assert count_parameters(1024 + 1280) == 3_053_057


def test_the_loss_is_the_mean_of_errors_weighed_by_their_own_size() -> None:
    made, wanted = torch.tensor([7.0, 9.5, 6.0]), torch.tensor([7.0, 9.0, 8.0])
    expected = torch.tensor([0.0, 1.25**2 * 0.25, 25.0 * 4.0], dtype=torch.float64)
    assert torch.equal(focal_loss(made, wanted, 2.0), expected)
    assert torch.equal(focal_loss(made, wanted, 0.0), (made - wanted).double().square())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_number_of_half_precision_has_a_finite_loss_and_gradient(dtype: torch.dtype) -> None:
    made = torch.tensor([torch.finfo(torch.float16).max], dtype=dtype).float().requires_grad_()
    loss = focal_loss(made, torch.zeros(1), 2.0).mean()
    loss.backward()
    assert torch.isfinite(loss) and made.grad is not None and torch.isfinite(made.grad).all()


@pytest.mark.parametrize("is_lowered", [True, False])
def test_in_bf16_predictions_stay_distinct(is_lowered: bool) -> None:
    torch.manual_seed(0)
    head = AffinityHead(24).eval()
    head.guess(9.0)
    features = torch.randn(500, 24)
    if is_lowered:
        head.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=not is_lowered):
        made = head(features)
    assert made.dtype == torch.float32
    assert len(made.unique()) > 300
    assert len(made.bfloat16().unique()) < 20  # what would be left of them


def test_before_the_first_step_every_pair_is_near_the_guess() -> None:
    torch.manual_seed(0)
    head = AffinityHead(24).eval()
    head.guess(7.5)
    with torch.no_grad():
        assert (head(torch.randn(100, 24)) - 7.5).abs().max() < 0.3

"""AdamW over bf16 weights with float32 masters: the same update as torch's own, saved and restored like any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jackline.trainer.optim.optimizer import MasterAdamW, clip_gradients, gradient_norm, make_optimizer

LR, BETAS, DECAY = 1e-2, (0.9, 0.95), 0.1


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        # Values that bf16 holds exactly, so that both optimizers see the same ones.
        weight.grad = torch.randn(weight.shape, generator=generator).to(torch.bfloat16).to(weight.dtype)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_masters_move_exactly_as_float32_weights_do(clip: float) -> None:
    wide, low = model_of(), model_of()
    plain = make_optimizer(wide, lr=LR, betas=BETAS, weight_decay=DECAY, precision="fp32")
    ours = make_optimizer(low, lr=LR, betas=BETAS, weight_decay=DECAY, precision="bf16-weights")
    assert isinstance(ours, MasterAdamW)
    assert {weight.dtype for weight in low.parameters()} == {torch.bfloat16}
    for step in range(20):
        set_gradients(wide, step)
        set_gradients(low, step)
        assert torch.allclose(clip_gradients(plain, clip), clip_gradients(ours, clip), rtol=1e-6)
        plain.step()
        ours.step()
    for weight, twin in zip(wide.parameters(), low.parameters(), strict=True):
        torch.testing.assert_close(ours.state[twin]["master"], weight.detach(), rtol=2e-6, atol=1e-7)
        assert torch.equal(twin.detach(), ours.state[twin]["master"].to(torch.bfloat16))


def test_updates_too_small_for_bf16_are_not_lost() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 256.0)
    ours = make_optimizer(model, lr=1e-3, betas=BETAS, weight_decay=0.0, precision="bf16-weights")
    for _ in range(2000):
        model.weight.grad = torch.ones_like(model.weight)
        ours.step()
    assert model.weight.item() == pytest.approx(254.0, abs=0.01)


def test_a_norm_of_bf16_gradients_has_all_its_digits() -> None:
    gradients = [torch.full((1000,), 0.1, dtype=torch.bfloat16), torch.full((3,), 2.0, dtype=torch.bfloat16)]
    wanted = torch.cat([gradient.double() for gradient in gradients]).norm().item()
    assert gradient_norm(gradients).item() == pytest.approx(wanted, rel=1e-6)
    assert gradient_norm(gradients).dtype == torch.float32


def test_weights_without_a_gradient_stay_and_count_no_step() -> None:
    model = model_of()
    ours = make_optimizer(model, lr=LR, betas=BETAS, weight_decay=DECAY, precision="bf16-weights")
    set_gradients(model, 0)
    first = next(model.parameters())
    first.grad = None
    before = first.detach().clone()
    ours.step()
    assert torch.equal(first.detach(), before)
    assert [int(ours.state[weight]["step"]) for weight in model.parameters()] == [0, 1, 1, 1, 1, 1]


def test_matrices_decay_and_vectors_do_not() -> None:
    optimizer = make_optimizer(model_of(), lr=LR, betas=BETAS, weight_decay=DECAY, precision="fp32")
    kinds = [
        (group["weight_decay"], {weight.dim() for weight in group["params"]}) for group in optimizer.param_groups
    ]
    assert kinds == [(DECAY, {2}), (0.0, {1})]

"""The one-pass AdamW kernel against the operators of torch that it stands for; needs a GPU and Triton."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jackline.trainer.optim.optimizer import MasterAdamW, clip_gradients, make_optimizer

needs_card = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: the kernel runs on nothing else"
)


def _trained(use_kernel: bool, clip: float) -> tuple[nn.Module, MasterAdamW, list[float]]:
    torch.manual_seed(0)
    # Sizes below, at and beyond a block of the kernel, and one that is no multiple of sixteen.
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 257), nn.Linear(257, 33)).cuda()
    optimizer = make_optimizer(model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, precision="bf16-weights")
    assert isinstance(optimizer, MasterAdamW)
    if not use_kernel:
        optimizer._kernel = False
    norms = []
    for step in range(20):
        torch.manual_seed(step)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        norms.append(float(clip_gradients(optimizer, clip)))
        optimizer.step()
    return model, optimizer, norms


@needs_card
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_kernel_gives_what_the_operators_of_torch_give(clip: float) -> None:
    ours, our_rule, our_norms = _trained(True, clip)
    theirs, their_rule, their_norms = _trained(False, clip)

    assert our_norms == their_norms
    assert our_rule._kernel
    for weight, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        left, right = our_rule.state[weight], their_rule.state[other]
        for name in ("step", "exp_avg", "exp_avg_sq", "master"):
            torch.testing.assert_close(left[name], right[name], rtol=2e-6, atol=1e-7)
        assert torch.equal(weight, left["master"].to(torch.bfloat16))


@needs_card
def test_two_runs_of_the_kernel_are_bit_equal() -> None:
    first, first_rule, _ = _trained(True, 1.0)
    second, second_rule, _ = _trained(True, 1.0)

    for weight, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(weight, other)
        assert torch.equal(first_rule.state[weight]["master"], second_rule.state[other]["master"])

"""The one-pass loss kernel against plain cross-entropy; needs a card and Triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.models.loss import IGNORED, can_use_kernel, summed_cross_entropy

needs_card = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA card: the kernel runs on nothing else"
)


def _case(vocab: int) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(64, vocab, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(4, 33, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab, (4, 33), device="cuda")
    targets[0, :5] = IGNORED
    return head, hidden, targets


@needs_card
@pytest.mark.parametrize("vocab", [50_304, 50_257, 512, 7])
def test_the_kernel_gives_loss_and_slopes_of_plain_cross_entropy(vocab: int) -> None:
    head, hidden, targets = _case(vocab)
    assert can_use_kernel(head, hidden)
    (summed_cross_entropy(head, hidden, targets) / 127).backward()
    ours = hidden.grad, head.weight.grad

    exact = hidden.detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    logits = (exact @ weight.t()).flatten(0, 1)
    expected = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    (expected / 127).backward()

    with torch.no_grad():
        found = summed_cross_entropy(head, hidden, targets)
    assert abs(float(found) / float(expected) - 1) < 2e-3
    for left, right in zip(ours, (exact.grad, weight.grad), strict=True):
        assert left is not None and right is not None
        assert float((left.double() - right).norm() / right.norm()) < 1e-2  # bf16 has 8 bits


@needs_card
def test_the_kernel_gives_the_same_bits_twice_and_within_a_compiled_model() -> None:
    head, hidden, targets = _case(50_304)
    plain = [
        torch.autograd.grad(summed_cross_entropy(head, hidden, targets), [hidden, head.weight]) for _ in range(2)
    ]
    compiled = torch.compile(summed_cross_entropy, fullgraph=True, dynamic=False)
    within = torch.autograd.grad(compiled(head, hidden, targets), [hidden, head.weight])

    for first, second, third in zip(*plain, within, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_what_the_kernel_cannot_do_goes_the_plain_way() -> None:
    rows = torch.randn(3, 4)

    assert not can_use_kernel(nn.Linear(4, 5, bias=False), rows)  # no card, float32

"""The one-pass loss kernel against plain cross-entropy; needs a GPU and Triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.models.loss import IGNORED, summed_cross_entropy, why_no_kernel

needs_card = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: the kernel runs on nothing else"
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
def test_the_kernel_gives_loss_and_gradients_of_plain_cross_entropy(vocab: int) -> None:
    head, hidden, targets = _case(vocab)
    assert why_no_kernel(head) == ""
    found = summed_cross_entropy(head, hidden, targets, has_kernel=True)
    (found / 127).backward()
    ours = hidden.grad, head.weight.grad

    exact = hidden.detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    logits = (exact @ weight.t()).flatten(0, 1)
    expected = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    (expected / 127).backward()

    assert abs(float(found.detach()) / float(expected.detach()) - 1) < 2e-3
    for left, right in zip(ours, (exact.grad, weight.grad), strict=True):
        assert left is not None and right is not None
        assert float((left.double() - right).norm() / right.norm()) < 1e-2  # bf16 has 8 bits


@needs_card
@pytest.mark.filterwarnings("ignore")  # torch.compile has its own to say on some GPUs
def test_the_kernel_gives_the_same_bits_twice_and_within_a_compiled_model() -> None:
    head, hidden, targets = _case(50_304)

    def loss() -> Tensor:
        return summed_cross_entropy(head, hidden, targets, has_kernel=True)

    plain = [torch.autograd.grad(loss(), [hidden, head.weight]) for _ in range(2)]
    within = torch.autograd.grad(torch.compile(loss, fullgraph=True, dynamic=False)(), [hidden, head.weight])

    for first, second, third in zip(*plain, within, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_a_head_that_the_kernel_cannot_do_is_told_apart_with_a_reason() -> None:
    assert why_no_kernel(nn.Linear(4, 5)) == "the head is more than one matrix"
    assert why_no_kernel(nn.Linear(4, 5, bias=False)) == "it needs bf16 weights on a GPU"

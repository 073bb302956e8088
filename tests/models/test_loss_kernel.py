"""The one-pass loss kernel against plain cross-entropy; needs a GPU and Triton."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.models.loss import IGNORED, summed_cross_entropy, why_no_kernel

needs_card = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: the kernel runs on nothing else"
)

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not (HAS_TRITON and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")),
    reason="needs Triton and a CUDA GPU, or Triton and TRITON_INTERPRET=1",
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


@needs_triton
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("far", [0.0, 60.0, 200.0, -200.0, 3000.0])
def test_rows_whose_end_is_far_above_their_beginning_are_summed_too(
    far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackline.models import loss_kernel

    monkeypatch.setattr(loss_kernel, "TILE", {"block": 16, "stages": 2, "num_warps": 4})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(0)).to(device)
    logits[1, 50] += far
    labels = torch.tensor([4, 50, IGNORED], device=device)
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(exact, labels, ignore_index=IGNORED, reduction="none")
    expected.sum().backward()

    losses = loss_kernel.overwrite_with_gradients(logits, labels)

    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-4, atol=1e-6)


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

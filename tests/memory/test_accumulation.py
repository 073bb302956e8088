"""Sums of gradients: in place on the GPU, and so in a trace, unless somebody else holds the first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jackline.memory.predict.trace import Recorder, references_of_one_holder

ROWS, WIDTH = 64, 512
STREAM_BYTES = 4 * ROWS * WIDTH


def made_in_backward(loss: Callable[[Tensor, Tensor], Tensor]) -> int:
    """How many blocks as large as the stream backward makes."""
    recorder = Recorder()
    stream = torch.empty((ROWS, WIDTH), device="meta", requires_grad=True)
    weight = torch.empty((WIDTH, 1), device="meta", requires_grad=True)
    with recorder:
        made = loss(stream, weight)
        recorder.phase = "backward"
        torch.autograd.backward(made)
    trace = recorder.finish()
    return sum(one.num_bytes == STREAM_BYTES and one.phase == "backward" for one in trace.allocations)


def last(value: Tensor, weight: Tensor) -> Tensor:
    return (value @ weight).sum()


def test_pytorch_lets_references_be_counted() -> None:
    assert references_of_one_holder() is not None


def test_the_gradient_of_a_residual_connection_is_summed_in_place() -> None:
    def loss(stream: Tensor, weight: Tensor) -> Tensor:
        hidden = stream * 2
        return last(hidden + torch.tanh(hidden), weight)

    # that of the sum, tanh's, then stream's: the sum of the first two is none
    assert made_in_backward(loss) == 3


def test_a_gradient_that_waits_elsewhere_too_is_not_written_into() -> None:
    def early(stream: Tensor, weight: Tensor) -> Tensor:
        hidden = stream * 2
        other = stream * 3
        bent = torch.tanh(hidden)
        return last(bent + (hidden + other), weight)

    def late(stream: Tensor, weight: Tensor) -> Tensor:
        hidden = stream * 2
        bent = torch.tanh(hidden)
        other = stream * 3
        return last(bent + (hidden + other), weight)

    # Backward goes from the last to the first. Where `other` is before tanh, its gradient, which is also that of
    # `hidden`, still waits for it when tanh's arrives.
    assert made_in_backward(late) == 4  # that of the sums, other's, tanh's, hidden's
    assert made_in_backward(early) == 5


def test_a_sum_that_is_computed_again_is_made_again() -> None:
    def block(value: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(value) + torch.tanh(value * 2))

    def plain(stream: Tensor, weight: Tensor) -> Tensor:
        return last(block(stream), weight)

    def recomputed(stream: Tensor, weight: Tensor) -> Tensor:
        made = checkpoint(block, stream, use_reentrant=False)
        assert isinstance(made, Tensor)
        return last(made, weight)

    # tanh, product, tanh, their sum, tanh
    assert made_in_backward(recomputed) == made_in_backward(plain) + 5


def test_real_tensors_are_summed_for_real() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Recorder("cpu"):
        (weight * weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]

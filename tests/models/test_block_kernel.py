"""The kernels of a GPT block against plain torch: on a GPU, or on a CPU by Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/models/test_block_kernel.py     with Triton installed, without a GPU
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jackline.models.gpt import GPT, Block, why_no_kernels
from jackline.models.shapes import GPTShape

HAS_CARD = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not (HAS_TRITON and (HAS_CARD or os.environ.get("TRITON_INTERPRET") == "1")),
    reason="needs Triton and a CUDA GPU, or Triton and TRITON_INTERPRET=1",
)
needs_card = pytest.mark.skipif(not (HAS_CARD and HAS_TRITON), reason="needs a CUDA GPU and Triton")
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")
# exp overflows to infinity where gelu is 0, as on a GPU; numpy warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
SHAPE = GPTShape(2, 2, 48, context=64, vocab_size=97)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the interpreter takes a while; and a program has many rows then."""
    if HAS_TRITON and not HAS_CARD:
        from jackline.models import block_kernel

        monkeypatch.setattr(block_kernel, "NORM_PARTS", 5)
        monkeypatch.setattr(block_kernel, "GELU_PARTS", 3)


def draw(*sizes: int) -> Tensor:
    rng_state = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=rng_state).to(DEVICE).requires_grad_()


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradient = draw(*found.shape).detach()
    ours, right = (torch.autograd.grad(out, inputs, gradient, retain_graph=True) for out in (found, expected))
    for left, other in zip(ours, right, strict=True):
        torch.testing.assert_close(left, other, rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 48), (67, 100), (101, 16)])
def test_addition_and_norm_are_those_of_torch(rows: int, width: int) -> None:
    from jackline.models.block_kernel import add_norm

    stream, added, weight, bias, own, ahead = (
        draw(rows, width), draw(rows, width), draw(width), draw(width), draw(width), draw(width)
    )  # fmt: skip
    total, normed, *_ = add_norm(stream, added, weight, bias, 1e-5)
    plain = functional.layer_norm(stream + added, (width,), weight, bias, 1e-5)
    assert_same(torch.cat((total, normed)), torch.cat((stream + added, plain)), [stream, added, weight, bias])

    total, normed, *_ = add_norm(stream, added, weight, bias, 1e-5, own, ahead)
    plain = functional.layer_norm(stream + added + own, (width,), weight, bias, 1e-5)
    plain = torch.cat((stream + added + own + ahead, plain))
    assert_same(torch.cat((total, normed)), plain, [stream, added, weight, bias, own, ahead])


@needs_triton
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 48), (67, 700), (101, 16)])
def test_gelu_and_its_bias_are_those_of_torch(rows: int, width: int) -> None:
    from jackline.models.block_kernel import gelu

    before, bias = draw(rows, width), draw(width)
    assert_same(gelu(before, bias), functional.gelu(before + bias, approximate="tanh"), [before, bias])
    far = torch.tensor([[-1e4, -30.0, -5.0, 0.0, 5.0, 30.0, 1e4, -0.7]], device=DEVICE, requires_grad=True)
    zero = torch.zeros(8, device=DEVICE, requires_grad=True)
    assert_same(gelu(far, zero), functional.gelu(far + zero, approximate="tanh"), [far, zero])


@needs_triton
def test_a_block_with_kernels_has_the_gradients_of_a_plain_one() -> None:
    torch.manual_seed(0)
    block = Block(SHAPE).to(DEVICE)
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(std=0.3)
    stream, added = draw(2, 33, 48), draw(2, 33, 48)
    found = []
    for has_kernels in (True, False):
        block.has_kernels = has_kernels
        found.append(torch.stack(block.split(stream, added)).sum(0))
    assert_same(found[0], found[1], [stream, added, *block.parameters()])


@needs_card
@pytest.mark.filterwarnings("ignore")  # torch.compile has its own to say on some GPUs
def test_a_compiled_model_with_kernels_gives_the_same_bits_twice() -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE).to(DEVICE).bfloat16()
    assert model.use_kernels() == ""
    model.compile(dynamic=False)
    ids = torch.randint(0, 97, (4, 64), device=DEVICE)
    first, second = (torch.autograd.grad(model(ids, ids), list(model.parameters())) for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)
    for block in model.blocks:
        block.has_kernels = False
    plain = torch.autograd.grad(model.forward(ids, ids), list(model.parameters()))
    for left, right in zip(first, plain, strict=True):
        assert float((left.float() - right.float()).norm() / right.float().norm()) < 0.03


def test_a_block_that_the_kernels_cannot_do_is_told_apart_with_a_reason() -> None:
    assert why_no_kernels(Block(SHAPE)) == "they need bf16 weights on a GPU"
    assert why_no_kernels(Block(GPTShape(1, 1, 8, dropout=0.1))) == "the block is not a plain one of GPT-2"
    assert why_no_kernels(Block(GPTShape(1, 1, 8, activation="relu"))) == "the block is not a plain one of GPT-2"
    block = Block(SHAPE)
    block.up = torch.nn.Sequential(block.up)  # type: ignore[assignment]
    assert why_no_kernels(block) == "the block is not a plain one of GPT-2"

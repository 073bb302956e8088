"""The kernels of sparse attention against plain torch: on a GPU, or on a CPU by Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/models/nsa/test_kernels.py     with Triton installed, without a GPU
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jackline.models.nsa import blocks, reference
from jackline.models.nsa import model as nsa_model
from jackline.models.nsa.model import NSAModel
from jackline.models.nsa.reference import Memory
from jackline.models.nsa.shape import NSAShape

HAS_CARD = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(
    not (HAS_TRITON and (HAS_CARD or os.environ.get("TRITON_INTERPRET") == "1")),
    reason="needs Triton and a CUDA GPU, or Triton and TRITON_INTERPRET=1",
)
needs_card = pytest.mark.skipif(not (HAS_CARD and HAS_TRITON), reason="needs a CUDA GPU and Triton")
DEVICE = torch.device("cuda" if HAS_CARD else "cpu")

SMALL = NSAShape(
    num_layers=2, width=48, num_heads=3, num_groups=1, head_width=16, vocab_size=37,
    compressed_length=8, compressed_stride=4, block_length=16, num_blocks=4, window=24,
)  # fmt: skip


def draw(*sizes: int) -> Tensor:
    rng_state = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=rng_state).to(DEVICE).requires_grad_()


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradient = draw(*found.shape).detach()
    ours, right = (torch.autograd.grad(out, inputs, gradient, allow_unused=True) for out in (found, expected))
    for left, other in zip(ours, right, strict=True):
        torch.testing.assert_close(left, other, rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize(
    ("length", "stride", "last", "reach"),
    [(1, 1, 0, 24), (31, 1, 0, 24), (33, 1, 0, 1), (70, 1, 0, 24), (100, 1, 0, 1 << 30), (8, 4, 7, 1 << 30),
     (101, 4, 7, 1 << 30), (101, 4, 3, 40)],
)  # fmt: skip
def test_the_band_kernel_is_a_masked_softmax(length: int, stride: int, last: int, reach: int) -> None:
    from jackline.models.nsa.band_kernel import band_attention

    num_keys = (length - 1 - last) // stride + 1
    query, keys, values = draw(2, length, 4, 16), draw(2, num_keys, 2, 16), draw(2, num_keys, 2, 16)
    at = torch.arange(num_keys, device=DEVICE) * stride + last
    distance = torch.arange(length, device=DEVICE)[:, None] - at

    found, _ = band_attention(query, keys, values, stride, last, reach)

    expected, _ = reference.masked_attention(query, keys, values, (distance >= 0) & (distance < reach))
    assert_same(found, expected, [query, keys, values])


@needs_triton
@pytest.mark.parametrize("many", [1, 512])
def test_gradients_of_keys_are_summed_over_spans_of_queries(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from jackline.models.nsa import band_kernel

    monkeypatch.setattr(band_kernel, "_SPAN", 64)
    monkeypatch.setattr(band_kernel, "_MANY_PROGRAMS", many)  # a whole group at a time, a head at a time
    length, stride, last = 201, 4, 7
    num_keys = (length - 1 - last) // stride + 1
    query, keys, values = draw(2, length, 4, 16), draw(2, num_keys, 2, 16), draw(2, num_keys, 2, 16)
    at = torch.arange(num_keys, device=DEVICE) * stride + last

    found, _ = band_kernel.band_attention(query, keys, values, stride, last, band_kernel.ENDLESS)

    visible = torch.arange(length, device=DEVICE)[:, None] >= at
    assert_same(found, reference.masked_attention(query, keys, values, visible)[0], [query, keys, values])


@needs_triton
@pytest.mark.parametrize("scratch", [1 << 25, 1])
def test_the_kernel_chooses_the_blocks_that_plain_torch_chooses(
    scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jackline.models.nsa import choice_kernel, fast

    monkeypatch.setattr(choice_kernel, "_SCRATCH_FLOATS", scratch)  # in one piece, in pieces of 64 queries
    shape = replace(SMALL, num_heads=4, num_groups=2)
    query, parts = draw(1, 133, 4, 16) * 2, draw(6, 1, 133, 2, 16)

    found = fast.attend(query, Memory(*parts), shape).selection

    assert torch.equal(found, reference.attend(query, Memory(*parts), shape).selection)


@needs_triton
def test_ties_and_nan_choose_existing_blocks_from_the_first() -> None:
    from jackline.models.nsa.choice_kernel import choose_blocks

    for fill in (0.0, float("nan")):
        query = torch.full((1, 133, 3, 16), fill, device=DEVICE)
        keys = torch.zeros(1, SMALL.num_compressed(133), 1, 16, device=DEVICE)
        logs = torch.full((1, 3, 133), float("inf"), device=DEVICE)  # every share is zero
        found = choose_blocks(query, keys, logs, SMALL)
        assert found[0, 0, 132].tolist() == [0, 7, 8, 1]
        assert found[0, 0, 15].tolist() == [0, -1, -1, -1]


@needs_triton
@pytest.mark.parametrize("span", [512, 20])
def test_the_selected_kernel_is_a_masked_softmax(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from jackline.models.nsa import selected_kernel

    monkeypatch.setattr(selected_kernel, "_SPAN", span)
    shape = replace(SMALL, num_heads=6, num_groups=2)
    length = 117
    query, keys, values = draw(1, length, 6, 16), draw(1, length, 2, 16), draw(1, length, 2, 16)
    scores = torch.rand(1, 2, length, shape.num_selectable(length)).to(DEVICE)
    selection = blocks.pick_blocks(scores, shape)

    found = selected_kernel.selected_attention(query, keys, values, selection, 16)

    visible = blocks.visible_in_blocks(selection, length, 16)[:, :, None]
    assert_same(found, reference.masked_attention(query, keys, values, visible)[0], [query, keys, values])


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton: the plan stands beside its kernel")
def test_a_plan_lists_every_choice_once_under_its_block() -> None:
    from jackline.models.nsa.selected_kernel import _spans, plan_blocks

    selection = blocks.pick_blocks(torch.rand(2, 2, 100, 7), SMALL)
    entries, begins = plan_blocks(selection, 7)
    before, owners = _spans(begins, 400, 16)
    for place, choice in enumerate(selection.view(4, 400)):
        for block in range(7):
            begin, end = begins[place, block : block + 2].tolist()
            assert entries[place, begin:end].tolist() == (choice == block).nonzero().flatten().tolist()
            spans = (owners[place] == block).nonzero().flatten().tolist()
            assert spans == list(range(int(before[place, block]), int(before[place, block + 1])))
            assert len(spans) == -(-(end - begin) // 16)


@needs_triton
@pytest.mark.parametrize("length", [5, 64, 90])
def test_the_model_gives_the_same_loss_and_gradients_by_both_roads(length: int) -> None:
    torch.manual_seed(0)
    model = NSAModel(SMALL).to(DEVICE)
    ids, targets = torch.randint(0, 37, (2, 1, length), device=DEVICE)
    found = []
    for has_kernels, is_recomputing in ((False, False), (True, False), (True, True)):
        model.is_recomputing = is_recomputing
        for block in model.blocks:
            block.attention.has_kernels = has_kernels
        model.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-4)


@needs_triton
def test_a_compiler_sees_the_kernels_as_operators_of_one_graph() -> None:
    torch.manual_seed(0)
    model = NSAModel(replace(SMALL, num_layers=1), is_recomputing=True).to(DEVICE)
    model.blocks[0].attention.has_kernels = True
    ids, targets = torch.randint(0, 37, (2, 1, 70), device=DEVICE)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    found = []
    for road in (model, compiled):
        model.zero_grad()
        loss = road(ids, targets)
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@needs_triton
def test_the_check_compares_outputs_gradients_and_choice() -> None:
    off, same = nsa_model.compare(SMALL, DEVICE, torch.float32)
    assert off < 1e-4
    assert same == 1.0


@needs_triton
@pytest.mark.skipif(HAS_CARD, reason="float32 in tiles made for bf16 does not fit into a GPU's shared memory")
def test_the_tiles_made_for_a_gpu_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from jackline.models.nsa import band_kernel, choice_kernel, selected_kernel

    monkeypatch.setattr(band_kernel, "_WIDE_TILES", band_kernel.TILES["forward"])
    monkeypatch.setattr(choice_kernel, "_WIDE_TILES", choice_kernel.TILES["score"])
    monkeypatch.setattr(selected_kernel, "_WIDE_TILES", selected_kernel.TILES["backward"])
    off, same = nsa_model.compare(replace(SMALL, block_length=32, num_heads=6, width=96), DEVICE, torch.float32)
    assert off < 1e-4
    assert same == 1.0


@needs_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_may_use_the_kernels_for_the_real_shape(dtype: torch.dtype) -> None:
    assert nsa_model.why_no_kernels(NSAShape(), DEVICE, dtype) == ""


@needs_card
@pytest.mark.parametrize("length", [1, 40, 1000, 1024, 1025, 2047])
def test_the_real_shape_in_bf16_agrees_with_plain_torch_and_repeats_its_bits(length: int) -> None:
    from jackline.models.nsa import fast

    shape = NSAShape()
    query, parts = draw(2, length, 12, 64), draw(6, 2, length, 2, 64)
    low = [part.detach().bfloat16().requires_grad_() for part in (query, parts)]
    runs = []
    for _ in range(2):
        found = fast.attend(low[0], Memory(*low[1]), shape)
        total = sum(branch.float().square().sum() for branch in found[:3])
        runs.append([*found, *torch.autograd.grad(total, low)])
    assert all(torch.equal(left, right) for left, right in zip(*runs, strict=True))

    exact = [part.detach().float().requires_grad_() for part in low]
    expected = reference.attend(exact[0], Memory(*exact[1]), shape, runs[0][3])
    total = sum(branch.square().sum() for branch in expected[:3])
    right = [*expected[:3], *torch.autograd.grad(total, exact)]
    for left, other in zip(runs[0][:3] + runs[0][4:], right, strict=True):
        # A lone token's choice has no gradient: there float32's rounding of v . gradient (64 terms, about 128) times
        # a key times 1/8 is left, 16 units in the last place for every number.
        rounding = 4 * 16 * 2**-24 * left.numel() ** 0.5
        assert (left.float() - other).norm() <= 0.02 * other.norm() + rounding


@needs_card
@pytest.mark.filterwarnings("ignore")  # torch.compile has its own to say on some GPUs
@pytest.mark.parametrize("is_recomputing", [False, True])
def test_a_compiled_model_in_bf16_has_the_loss_of_the_plain_one(is_recomputing: bool) -> None:
    torch.manual_seed(0)
    shape = replace(NSAShape(), num_layers=2, vocab_size=512)
    model = NSAModel(shape, is_recomputing=is_recomputing).cuda().bfloat16()
    ids, targets = torch.randint(0, 512, (2, 2, 2048), device="cuda")
    plain = model(ids, targets).item()
    assert model.use_kernels() == ""
    torch.compiler.reset()
    compiled = torch.compile(model, dynamic=False)
    loss = compiled(ids, targets)
    loss.backward()
    assert abs(loss.item() / plain - 1) < 1e-3
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


def test_what_the_kernels_cannot_do_goes_the_plain_way() -> None:
    model = NSAModel(SMALL)

    assert model.use_kernels() == "they need bf16 or float32 on a GPU"
    assert not any(block.attention.has_kernels for block in model.blocks)
    odd = replace(SMALL, head_width=24)
    assert nsa_model.why_no_kernels(odd, torch.device("cuda"), torch.bfloat16) == (
        "their tiles are made for a head_width of 16, 32, 64 or 128, not 24"
    )

"""What CUDA does under autocast, as documented, seen on the meta device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jackline.memory.predict.cuda_rules import CudaRules, leaf_functions
from jackline.memory.predict.shortcuts import SHORTCUTS, run_meta
from jackline.memory.predict.trace import Recorder


@contextmanager
def under(low: torch.dtype | None, has_flash: bool = True) -> Iterator[CudaRules]:
    rules = CudaRules(low, has_flash=has_flash)
    with torch.device("meta"), leaf_functions(), rules, rules.autocast():
        yield rules


def test_products_are_low_and_norms_and_softmax_are_float32() -> None:
    with under(torch.bfloat16):
        value = torch.empty(4, 8)
        weight = nn.Parameter(torch.empty(8, 8))
        low = F.linear(value, weight)
        assert low.dtype == torch.bfloat16
        assert (value @ weight).dtype == torch.bfloat16
        assert torch.einsum("ij,jk->ik", value, weight).dtype == torch.bfloat16
        assert F.layer_norm(low, (8,)).dtype == torch.float32
        assert F.softmax(low, -1).dtype == torch.float32
        assert low.softmax(-1).dtype == torch.float32
        assert F.gelu(low).dtype == torch.bfloat16
        assert low.sum().dtype == torch.float32
        assert (value + low).dtype == torch.float32
        assert low.pow(2).dtype == torch.float32


def test_without_autocast_nothing_is_cast() -> None:
    with under(None):
        assert F.linear(torch.empty(2, 4), torch.empty(4, 4)).dtype == torch.float32


def test_the_rules_reach_into_pytorchs_own_python_functions() -> None:
    with under(torch.float16):
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        assert layer.self_attn.in_proj_weight.is_meta
        out = layer(torch.empty(2, 6, 16))
        assert out.dtype == torch.float32  # the last thing it does is a norm


def test_a_weight_is_cast_once_and_kept_until_autocast_ends() -> None:
    recorder, copies = Recorder(), []
    rules = CudaRules(torch.bfloat16, on_weight_copy=copies.append)
    with torch.device("meta"), leaf_functions(), recorder, rules:
        weight = nn.Parameter(torch.empty(8, 8))
        with rules.autocast():
            F.linear(torch.empty(4, 8), weight)
            F.linear(torch.empty(4, 8), weight)
        with rules.autocast():
            F.linear(torch.empty(4, 8), weight)
    assert len(copies) == 2


def kept_bytes_an_element(low: torch.dtype) -> float:
    recorder, rules = Recorder(), CudaRules(low)
    with torch.device("meta"), leaf_functions(), recorder, rules:
        hidden = torch.empty(512, 8, requires_grad=True)
        weight = nn.Parameter(torch.empty(4096, 8))
        targets = torch.empty(512, dtype=torch.long)
        begin = recorder.mark()
        with rules.autocast():
            loss = F.cross_entropy(F.linear(hidden, weight), targets)
        kept = recorder.survivors(begin)
        trace = recorder.finish(rules.class_sizes)
    assert loss.dtype == torch.float32
    return sum(trace.allocations[index].num_bytes for index in kept if trace.allocations[index].part == "logits") / (
        512 * 4096
    )


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_cross_entropy_keeps_low_log_probabilities_beside_their_float32_copy(low: torch.dtype) -> None:
    assert kept_bytes_an_element(low) == 2 + 4


def test_softmax_widens_float16_inside_the_kernel_and_bfloat16_by_a_copy() -> None:
    made = {}
    for low in (torch.float16, torch.bfloat16):
        recorder, rules = Recorder(), CudaRules(low)
        with torch.device("meta"), leaf_functions(), recorder, rules, rules.autocast():
            value = torch.empty(64, 64, dtype=low)
            begin = recorder.mark()
            torch.softmax(value, -1)
        made[low] = len(recorder.finish().allocations) - begin
    assert made == {torch.float16: 1, torch.bfloat16: 2}


@pytest.mark.parametrize("has_flash", [True, False])
@pytest.mark.parametrize("width", [64, 20])
def test_attention_never_holds_length_times_length(has_flash: bool, width: int) -> None:
    recorder, rules = Recorder(), CudaRules(torch.bfloat16, has_flash=has_flash)
    with torch.device("meta"), leaf_functions(), recorder, rules:
        qkv = [torch.empty(2, 4, 4096, width, requires_grad=True) for _ in range(3)]
        with rules.autocast():
            out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        assert out.shape == (2, 4, 4096, width)
        out.sum().backward()
    assert all(value.grad is not None and value.grad.shape == value.shape for value in qkv)
    assert max(made.num_bytes for made in recorder.finish().allocations) < 4 * 2 * 4 * 4096 * 128


def test_dropout_keeps_one_byte_an_element() -> None:
    recorder, rules = Recorder(), CudaRules()
    with torch.device("meta"), leaf_functions(), recorder, rules:
        value = torch.empty(1024, requires_grad=True)
        begin = recorder.mark()
        out = F.dropout(value, 0.1, True)
        kept = recorder.survivors(begin)
    assert sorted(recorder.finish().allocations[index].num_bytes for index in kept) == [1024, 4096]
    assert out.shape == value.shape


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_a_model_that_asks_whether_autocast_is_on_gets_the_gpus_answer(low: torch.dtype | None) -> None:
    before = torch.is_autocast_enabled, torch.get_autocast_dtype
    with CudaRules(low, has_flash=True).answers():
        assert torch.is_autocast_enabled("meta") is (low is not None)
        assert torch.is_autocast_enabled("cpu") is False
        assert torch.get_autocast_dtype("meta") is torch.bfloat16
    assert (torch.is_autocast_enabled, torch.get_autocast_dtype) == before


def test_torch_is_left_as_it_was() -> None:
    before = F.has_torch_function_unary
    with pytest.raises(RuntimeError, match="on purpose"), leaf_functions():
        raise RuntimeError("on purpose")
    assert F.has_torch_function_unary is before


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def shortcut_cases() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    aten, bf16, whole = torch.ops.aten, torch.bfloat16, torch.int64
    wide, low, norm = meta(4, 6, 8), meta(4, 6, 8, dtype=bf16), meta(8)
    matrix, weight, statistics = meta(24, 8), meta(8, 16), meta(4, 6, 1)
    backward = (wide, wide, [8], statistics, statistics, norm, norm)
    logits, targets = meta(24, 50), meta(24, dtype=whole)
    return [
        (aten.native_layer_norm.default, (wide, [8], norm, norm, 1e-5), {}),
        (aten.native_layer_norm_backward.default, (*backward, [True] * 3), {}),
        (aten.native_layer_norm_backward.default, (*backward, [True, False, True]), {}),
        (aten.addmm.default, (meta(16), matrix, weight), {}),
        (aten.addmm.default, (meta(24, 16), matrix, weight), {}),
        (aten.mm.default, (matrix, weight), {}),
        (aten.gelu.default, (low,), {}),
        (aten.gelu.default, (wide.transpose(0, 1),), {}),
        (aten.gelu_backward.default, (low, low), {}),
        (aten.add.Tensor, (wide, low), {}),
        (aten.add.Tensor, (wide, norm), {}),
        (aten.add.Tensor, (norm, low), {}),
        (aten.add.Tensor, (low, 2), {}),
        (aten.add.Tensor, (wide, statistics), {}),
        (aten.add.Tensor, (meta(4, dtype=whole), 2.5), {}),
        (aten.mul.Tensor, (low, wide), {}),
        (aten.div.Tensor, (low, 3.0), {}),
        (aten.div.Tensor, (meta(3, dtype=whole), 2), {}),
        (aten.add_.Tensor, (wide, low), {}),
        (aten.mul_.Tensor, (wide, norm), {}),
        (aten.embedding.default, (matrix, meta(2, 3, dtype=whole)), {}),
        (aten._softmax.default, (low, -1, False), {}),
        (aten._log_softmax.default, (meta(3, 4, dtype=torch.float16), -1, True), {}),
        (aten._log_softmax_backward_data.default, (logits, logits, 1, torch.float32), {}),
        (aten._softmax_backward_data.default, (low, low, 1, bf16), {}),
        (aten.nll_loss_forward.default, (logits, targets, None, 2, -100), {}),
        (aten.nll_loss_forward.default, (logits, targets, None, 0, -100), {}),
        (aten.nll_loss_backward.default, (meta(), logits, targets, None, 2, -100, meta()), {}),
        (aten.arange.default, (7,), {"device": "meta"}),
        (aten.arange.default, (7.5,), {"device": "meta"}),
        (aten.sum.dim_IntList, (wide, [0, -1]), {}),
        (aten.sum.dim_IntList, (low, [1], True), {"dtype": torch.float32}),
        (aten.sum.dim_IntList, (wide, []), {}),
        (aten.cat.default, ([low, low, meta(4, 6, 3, dtype=bf16)], 2), {}),
        (aten.cat.default, ([low, wide],), {}),
        (aten.empty_like.default, (low,), {"dtype": torch.float32}),
        (aten.zeros_like.default, (wide.transpose(0, 1),), {}),
        (aten.ones_like.default, (wide,), {"memory_format": torch.preserve_format}),
        (aten.native_dropout.default, (low, 0.1, True), {}),
        (aten.sub.Tensor, (low, wide), {}),
        (aten.mul.Scalar, (low, 2), {}),
        (aten.mul.Scalar, (meta(3, dtype=whole), 2.5), {}),
        (aten.div.Scalar, (wide[:, :1].expand(4, 6, 8), 3), {}),
        (aten.div.Scalar, (meta(3, dtype=whole), 2), {}),
        (aten.pow.Tensor_Scalar, (wide, 2), {}),
        (aten.pow.Tensor_Scalar, (meta(3, dtype=whole), 2), {}),
        (aten.neg.default, (low.transpose(1, 2),), {}),
        (aten.rsqrt.default, (statistics,), {}),
        (aten.rsqrt.default, (meta(3, dtype=whole),), {}),
        (aten.sigmoid.default, (low,), {}),
        (aten.tanh.default, (meta(3, dtype=whole),), {}),
        (aten.silu.default, (low,), {}),
        (aten.relu.default, (low,), {}),
        (aten.relu.default, (meta(3, dtype=whole),), {}),
        (aten.threshold_backward.default, (low, low, 0), {}),
        (aten.threshold_backward.default, (wide, wide.transpose(1, 2).contiguous().transpose(1, 2), 0), {}),
        (aten.native_dropout_backward.default, (low, meta(4, 6, 8, dtype=torch.bool), 1.1), {}),
        (aten.native_dropout_backward.default, (wide, meta(4, 6, 8, dtype=torch.bool), 1.1), {}),
        (aten.silu_backward.default, (low, low), {}),
        (aten.silu_backward.default, (low, low.transpose(0, 1).contiguous().transpose(0, 1)), {}),
        (aten.slice_backward.default, (low[..., :3], [4, 6, 8], 2, 0, 3, 1), {}),
        (aten.mean.dim, (wide, [-1], True), {}),
        (aten.mean.dim, (low, [0, 1]), {"dtype": torch.float32}),
        (aten.cat.default, ([low.transpose(0, 1), low.transpose(0, 1)], -1), {}),
        (aten.cat.default, ([meta(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)] * 2, 1), {}),
        (aten.cat.default, ([meta(2, 5, 3, 4).transpose(1, 2)] * 2, -1), {}),
    ]


@pytest.mark.parametrize("number", range(len(shortcut_cases())))
def test_a_shortcut_gives_what_pytorch_itself_gives(number: int) -> None:
    func, args, kwargs = shortcut_cases()[number]
    assert func in SHORTCUTS
    ours, theirs = run_meta(func, args, kwargs), func(*args, **kwargs)
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (ours, theirs)), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_every_shortcut_is_compared_with_pytorch() -> None:
    assert {func for func, _, _ in shortcut_cases()} == set(SHORTCUTS)


def test_layouts_of_results_are_those_of_pytorch() -> None:
    """Operands in all orders, with gaps, repeated and of one element: a wrong stride is a copy too many later."""
    chance = random.Random(0)
    aten = torch.ops.aten
    num_short = 0
    for _ in range(400):
        left, right = _any_layout(chance), _any_layout(chance)
        for func, args in (
            (aten.mul.Tensor, (left, right)),
            (aten.add.Tensor, (left, left.transpose(0, 1).contiguous().transpose(0, 1))),
            (aten.div.Tensor, (left, _any_layout(chance))),
            (aten.neg.default, (left,)),
            (aten.mul.Scalar, (left, 3)),
            (aten.cat.default, ([left, left], 1)),
        ):
            num_short += SHORTCUTS[func](*args) is not None
            ours, theirs = run_meta(func, args, {}), func(*args)
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert _steps(ours) == _steps(theirs), (func, [(one.shape, one.stride()) for one in args])
    assert num_short > 1200


def _any_layout(chance: random.Random) -> torch.Tensor:
    order = chance.sample(range(4), 4)
    sizes = [3, 4, 5, 6]
    made = torch.empty([sizes[at] for at in order], device="meta").permute([order.index(at) for at in range(4)])
    at = chance.randrange(4)
    way = chance.choice(("plain", "plain", "repeated", "one"))
    if way != "plain":
        made = made.narrow(at, 0, 1)
        made = made.expand(sizes) if way == "repeated" else made
    return made


def _steps(value: torch.Tensor) -> list[int]:
    """Strides; that of a dimension with one element means nothing."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]

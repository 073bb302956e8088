"""Sparse or dense attention: what is chosen and why, that a run keeps it, and that the dense model is right."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import jackline
from jackline.models.nsa.dense import DenseAttention, Timing, time_both
from jackline.models.nsa.model import NSAModel
from jackline.models.nsa.shape import NSA_SHAPES, NSAShape, count_parameters, flops_per_token
from jackline.trainer.startup import attention_kind
from jackline.trainer.startup.attention_kind import Kind, choose_kind, decide, kept_kind, measured
from tests.session.nursery import Nursery
from tests.trainer.test_loop import Trainings

SMALL = NSAShape(
    num_layers=2, width=64, num_heads=4, num_groups=2, head_width=16, vocab_size=128,
    compressed_length=8, compressed_stride=4, block_length=16, num_blocks=4, window=24, is_dense=True,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "kept", "timing", "expected"),
    [
        ("dense", None, None, Kind(True, "attention=dense")),
        ("sparse", True, Timing(9.0, 1.0), Kind(False, "attention=sparse")),
        ("auto", True, Timing(1.0, 9.0), Kind(True, "as this run began (attention=auto)")),
        ("auto", False, Timing(9.0, 1.0), Kind(False, "as this run began (attention=auto)")),
        ("auto", None, None, Kind(False, "attention=auto compares it with dense attention on a GPU only")),
    ],
)
def test_what_was_asked_for_and_what_a_run_has_go_before_a_measurement(
    asked: str, kept: bool | None, timing: Timing | None, expected: Kind
) -> None:
    assert decide(asked, kept=kept, timing=timing, length=1024) == expected


def test_dense_attention_is_chosen_where_it_is_measurably_faster() -> None:
    found = decide("auto", kept=None, timing=Timing(4.48, 1.47), length=1024)
    assert found.text == (
        "dense attention: at 1,024 tokens a layer takes 4.48 ms sparse and 1.47 ms dense, measured on this GPU; "
        "attention=sparse trains the sparse one"
    )
    found = decide("auto", kept=None, timing=Timing(13.1, 52.8), length=65_536)
    assert found.text == (
        "sparse attention: at 65,536 tokens a layer takes 13.10 ms sparse and 52.80 ms dense, measured on this GPU"
    )
    # The recipe's own kind is kept within 5 %, so it is never slower than 0.95 of the dense one.
    for share in (0.5, 0.9, 0.949, 0.95, 1.0, 1.5):
        kind = decide("auto", kept=None, timing=Timing(10.0, 10.0 * share), length=8192)
        assert (1.0 if kind.is_dense else share) >= 0.95
    unable = decide("auto", kept=None, timing=Timing(math.inf, 3.0), length=4096)
    assert unable.is_dense and "more memory than there is sparse" in unable.text


def test_a_measurement_is_made_once_and_kept_by_shape_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[int] = []

    def time_it(shape: NSAShape, length: int, *_: object, has_kernels: bool) -> Timing:
        calls.append(length)
        return Timing(2.0, 1.0)

    monkeypatch.setattr(attention_kind, "time_both", time_it)
    for _ in range(2):
        assert measured(SMALL, 64, torch.float32, CPU) == Timing(2.0, 1.0)
    assert calls == [64]
    measured(SMALL, 128, torch.float32, CPU)
    measured(replace(SMALL, window=32), 128, torch.float32, CPU)
    assert calls == [64, 128, 128]
    for kept in (tmp_path / "jackline" / "attention").iterdir():
        kept.write_text("{torn")
    assert measured(SMALL, 64, torch.float32, CPU) == Timing(2.0, 1.0)
    assert calls == [64, 128, 128, 64]


def test_both_kinds_can_be_timed() -> None:
    found = time_both(replace(SMALL, is_dense=False), 48, torch.float32, CPU, has_kernels=False)
    assert all(math.isfinite(value) and value > 0 for value in found)


def test_dense_attention_is_plain_causal_attention_of_turned_heads() -> None:
    torch.manual_seed(0)
    module, stream = DenseAttention(SMALL), torch.randn(2, 40, 64)
    query = module.query(stream).view(2, 40, 4, 16)
    keys, values = module.memory(stream).view(2, 40, 2, 2, 16).unbind(dim=2)
    angle = torch.arange(40.0)[:, None] * 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*heads.chunk(2, dim=-1)) * turn
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    query, keys = turned(query), turned(keys)
    mixed = torch.zeros(2, 40, 4, 16)
    for head in range(4):
        scores = query[:, :, head] @ keys[:, :, head // 2].transpose(1, 2) / 4.0
        scores = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -math.inf)
        mixed[:, :, head] = scores.softmax(dim=-1) @ values[:, :, head // 2]
    torch.testing.assert_close(module(stream), module.projection(mixed.flatten(2)), atol=1e-5, rtol=1e-4)


def test_the_dense_model_reads_no_later_token_and_has_the_counted_parameters() -> None:
    torch.manual_seed(0)
    model = NSAModel(SMALL)
    assert sum(weight.numel() for weight in model.parameters()) == count_parameters(SMALL)
    assert count_parameters(SMALL) < count_parameters(replace(SMALL, is_dense=False))
    assert flops_per_token(SMALL, 64) > 0
    assert model.use_kernels() == "" and model.statistics(torch.arange(40)[None]) == {}
    ids = torch.arange(40)[None]
    other = ids.clone()
    other[0, -1] = 99
    torch.testing.assert_close(model(ids)[:, :-1], model(other)[:, :-1], atol=0, rtol=0)
    assert not torch.equal(model(ids)[:, -1], model(other)[:, -1])


def test_with_auto_a_killed_dense_run_ends_bit_equal_and_is_loaded_as_dense(
    nursery: Nursery, corpus: Path, tmp_path: Path
) -> None:
    trainings = Trainings(nursery, corpus, tmp_path)
    words = ("seq_len=96", "batch_size=2")
    whole = trainings.finish("whole", *words, "attention=dense", RECIPE="m7c")
    assert "[model] dense attention: attention=dense" in whole.output
    assert trainings.run("killed", *words, "attention=dense", RECIPE="m7c", KILL_AT="8").code == -signal.SIGKILL
    folder = trainings.run_dir("killed").path
    assert kept_kind(folder) is True
    ended = trainings.finish("killed", *words, "attention=auto", RECIPE="m7c")
    assert "[model] dense attention: as this run began (attention=auto)" in ended.output
    assert "resuming from step-" in ended.output
    assert trainings.weights("killed") == trainings.weights("whole")
    assert trainings.losses("killed").items() <= trainings.losses("whole").items()

    sparse = NSA_SHAPES["m7c-showcase"]
    shape, _ = choose_kind("auto", sparse, 96, dtype=torch.float32, device=CPU, folder=folder)
    assert shape == replace(sparse, is_dense=True)
    shape, text = choose_kind("auto", sparse, 96, dtype=torch.float32, device=CPU, folder=tmp_path / "none")
    assert shape == sparse and text.startswith("sparse attention: attention=auto compares")
    # The settings of the last attempt say auto; the weights tell which model they are of.
    model: nn.Module = jackline.load(folder, device="cpu").model
    assert isinstance(model, NSAModel) and model.shape.is_dense

"""What kernels take for themselves, against the allocator's history of an H200."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.kernels import scratch_of
from jackline.memory.predict.step import predict, trace_step

MIB = 2**20
H200 = GPU_MODELS["H200"].processors


def taken(name: str, *args: object, gpu: str = "H200") -> list[int]:
    return [one.num_bytes(GPU_MODELS[gpu].processors) for one in scratch_of(name, args)]


@pytest.mark.parametrize(
    ("rows", "width", "mib"),
    [
        (2048, 512, 8.0),
        (2048, 1536, 24.0),
        (4096, 1024, 32.0),
        (4096, 3072, 96.0),
        (4096, 4096, 128.0),
        (5120, 768, 30.0),
        (5120, 2304, 90.0),
        (5120, 3072, 120.0),
        (8192, 768, 48.0),
        (8192, 2304, 132.75),
        (8192, 3072, 132.0),
        (16384, 1024, 128.0),
        (16384, 4096, 132.0),
    ],
)
def test_the_sum_over_many_rows_takes_what_the_h200_took(rows: int, width: int, mib: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.empty((rows, width), dtype=dtype, device="meta")
        room, semaphores = taken("sum", grad, [0], True)
        assert room == mib * MIB
        assert 0 < semaphores <= 512


def test_a_sum_of_few_rows_or_along_the_rows_takes_next_to_nothing() -> None:
    positions = torch.empty((10, 512, 768), device="meta")
    assert taken("sum", positions, [0], True) == [0, 0]
    assert taken("sum", torch.empty((4096, 16, 64), device="meta"), [-1]) == [0, 0]
    assert taken("sum", torch.empty((512, 1024), device="meta"), [0]) == [0, 0]
    whole = taken("sum", torch.empty((4096, 4096), device="meta"))
    assert 0 < whole[0] <= 64 * 1024
    assert taken("sum", torch.empty((), device="meta")) == [0, 0]
    assert taken("sum", torch.empty((0, 4), device="meta"), [0]) == []


def test_dimensions_that_lie_behind_one_another_are_one() -> None:
    grad = torch.empty((4, 1024, 1024), device="meta")
    assert taken("sum", grad, [0, 1]) == taken("sum", grad.view(4096, 1024), [0])
    assert taken("mean", grad, [-3, -2]) == taken("sum", grad, [0, 1])


def test_a_width_that_cannot_be_read_by_fours_takes_less_at_once() -> None:
    even, odd = (taken("sum", torch.empty((4096, width), device="meta"), [0])[0] for width in (1024, 1023))
    assert even == 4 * 1024 * 64 * 32 * 4
    assert odd == 4 * 1023 * 16 * 32


def test_a_gpu_with_fewer_processors_shares_the_work_among_fewer_blocks() -> None:
    grad = torch.empty((16384, 4096), device="meta")
    rooms = {gpu: taken("sum", grad, [0], gpu=gpu)[0] for gpu in ("T4", "A100-80", "H200")}
    assert rooms == {"T4": 32 * MIB, "A100-80": 108 * MIB, "H200": 132 * MIB}


@pytest.mark.parametrize(
    ("count", "width", "num_bytes"),
    [(5120, 768, 17301504), (8192, 768, 27681792), (16384, 1024, 73818112), (4096, 1024, 18452480)],
)
def test_the_gradient_of_an_embedding_takes_what_the_h200_took(count: int, width: int, num_bytes: int) -> None:
    grad, ids = torch.empty((count, width), device="meta"), torch.empty(count, dtype=torch.long, device="meta")
    assert taken("embedding_dense_backward", grad, ids, 50257, -1, False) == [8 * count, 8 * count, num_bytes]


def test_few_indices_are_not_sorted_and_few_rows_make_few_parts() -> None:
    grad, ids = torch.empty((3072, 64), device="meta"), torch.empty(3072, dtype=torch.long, device="meta")
    assert taken("embedding_dense_backward", grad, ids, 256, -1, False) == [0, 0, 0]
    grad, ids = torch.empty((16384, 64), device="meta"), torch.empty(16384, dtype=torch.long, device="meta")
    assert taken("embedding_dense_backward", grad, ids, 256, -1, False)[2] == 4 * 64 * (256 + 1638)


def test_other_operators_take_nothing() -> None:
    assert scratch_of("mm", (torch.empty((4, 4), device="meta"), torch.empty((4, 4), device="meta"))) == []


# What an operator allocates, in order: positive sizes are made, negative ones freed.


def large_events(model: nn.Module, value: Callable[[int], Tensor], least: int = MIB) -> list[float]:
    """MiB, of the second step of two."""
    job = Job("mine", lambda _: model, value, lambda made, x: made(x).sum(), 1, StepOptions("fp32"))
    trace = trace_step(job, 1, GPU_MODELS["H200"], job.options, is_accumulating=False)
    sizes = [(trace.allocations[max(event, ~event)].num_bytes, event >= 0) for event in trace.events]
    return [(size if is_made else -size) / MIB for size, is_made in sizes if size >= least]


class Turned(nn.Module):
    """Its input comes with rows that do not lie in one piece."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.inner(value.transpose(1, 2))
        return made


def test_a_bias_is_added_in_place_to_rows_that_are_not_in_one_piece() -> None:
    found = large_events(Turned(nn.Linear(256, 2048)), lambda _: torch.zeros(4, 256, 512), 16 * MIB)
    assert found.count(16.0) == 2  # the result, once in each step: no copy with the bias


def test_a_convolution_with_a_filter_a_channel_copies_such_an_input_before_its_result() -> None:
    conv = nn.Conv1d(256, 256, 4, groups=256, padding=3)
    found = large_events(Turned(conv), lambda _: torch.zeros(4, 2048, 256, requires_grad=True), 7 * MIB)
    assert [round(size) for size in found[:4]] == [8, 8, 8, -8]  # the batch, the copy, the result, the copy's end


def test_a_recurrent_network_reserves_what_an_h200_reserved() -> None:
    """Two layers of 1024 in float32, 32 samples of 256 words of 20,000: 3284 MiB reserved, 2898 allocated."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20_000, 512), nn.Linear(1024, 20_000)
            self.layers = nn.LSTM(512, 1024, 2, batch_first=True, dropout=0.1)

        def forward(self, ids: Tensor) -> Tensor:
            out, _ = self.layers(self.embedding(ids))
            return functional.cross_entropy(self.head(out).flatten(0, 1), ids.flatten())

    job = Job(
        "mine",
        lambda _: Words(),
        lambda count: torch.zeros((count, 256), dtype=torch.long),
        lambda model, ids: model(ids),
        32,
        StepOptions("fp32"),
    )
    found = predict(job, 32, GPU_MODELS["H200"], is_accumulating=False)
    assert found.peak_allocated_bytes == pytest.approx(2898 * MIB, rel=0.005)
    assert found.peak_reserved_bytes == pytest.approx(3284 * MIB, rel=0.01)

"""What kernels take for themselves, against the allocator's history of an H200."""

from __future__ import annotations

import pytest
import torch

from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.predict.kernels import scratch_of

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

"""How long single operators take: against kernels that were timed on an H200 (CUDA events, torch 2.11)."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jackline.memory.plan.gpus import find_gpu
from jackline.memory.plan.probe import start_factor
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.kernel_time import Kernel, kernel_of, seconds
from jackline.memory.predict.step import trace_step
from jackline.memory.predict.trace import Trace
from jackline.memory.predict.work import Work, estimate

H200 = find_gpu("H200")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def us(name: str, args: tuple[object, ...], result: Tensor) -> float:
    return 1e6 * seconds(kernel_of(name, args, result), H200.rates, H200.num_multiprocessors)


@pytest.mark.parametrize(
    ("rows", "columns", "summed", "dtype", "measured_us"),
    [
        (8192, 4096, 4096, torch.bfloat16, 353),
        (8192, 1024, 4096, torch.bfloat16, 93),
        (8192, 4096, 4096, torch.float32, 5388),
        (2048, 1024, 1024, torch.float32, 100),
        # A vocabulary that is no multiple of 8: the tensor cores cannot load its rows.
        (4096, 50257, 768, torch.bfloat16, 3360),
        (4096, 30522, 768, torch.bfloat16, 805),
    ],
)
def test_products_take_what_was_measured(
    rows: int, columns: int, summed: int, dtype: torch.dtype, measured_us: float
) -> None:
    pair = empty(rows, summed, dtype=dtype), empty(summed, columns, dtype=dtype)
    assert us("mm", pair, empty(rows, columns, dtype=dtype)) == pytest.approx(measured_us, rel=0.25)


def test_elementwise_kernels_wait_for_memory_or_for_addresses() -> None:
    large = empty(131072, 1024)
    assert us("add", (large, large), large) == pytest.approx(200, rel=0.3)
    column = empty(8192, 1)
    broadcast = us("mul", (empty(8192, 2048), column), empty(8192, 2048))
    assert broadcast == pytest.approx(52, rel=0.3)  # as many bytes of one layout take 20
    crossed = empty(131072, 1024, dtype=torch.float32)
    assert us("clone", (crossed.t(),), empty(1024, 131072, dtype=torch.float32)) == pytest.approx(1040, rel=0.4)


def test_batch_norm_of_few_channels_has_few_processors() -> None:
    few, many = empty(32, 16, 112, 112), empty(32, 128, 56, 28)
    assert few.numel() == many.numel()
    few_us, many_us = (us("native_batch_norm_backward", (one, one), one) for one in (few, many))
    assert few_us == pytest.approx(530, rel=0.25)
    assert many_us < few_us / 4


def test_python_and_the_gpu_wait_for_each_other_in_the_order_of_the_step() -> None:
    fast = Work(Kernel(1e-6), start_us=100)
    slow = Work(Kernel(5e-3), start_us=1)

    def seconds_of(*work: Work) -> float:
        idle = replace(small_trace(), work=())
        return estimate(replace(idle, work=work), H200).seconds - estimate(idle, H200).seconds

    # Ten starts while the GPU is busy cost nothing; ten before it has something to do cost 1 ms.
    assert seconds_of(slow, *[fast] * 10, slow) == pytest.approx(
        seconds_of(*[fast] * 10, slow, slow) - 0.001, rel=0.02
    )


@functools.cache
def small_trace() -> Trace:
    job = Job(
        "mine",
        lambda _: nn.Linear(64, 64),
        lambda n: torch.zeros(n, 64),
        lambda model, x: functional.gelu(model(x)).sum(),
        4,
        StepOptions("bf16"),
    )
    return trace_step(job, 4, H200, job.options, is_accumulating=False)


def test_a_machine_whose_python_is_slow_takes_longer_where_the_gpu_waits() -> None:
    trace = small_trace()
    slow = replace(H200, start_factor=2.0)
    assert estimate(trace, slow).seconds == pytest.approx(2 * estimate(trace, H200).seconds, rel=0.05)
    assert 0.4 <= start_factor("cpu") <= 3.0

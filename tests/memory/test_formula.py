"""The closed form against the trace: two roads to the same figure."""

from __future__ import annotations

import pytest

from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.predict.job import StepOptions
from jackline.memory.predict.step import predict
from jackline.models.shapes import SHAPES, count_parameters
from tests.memory.formula import GptNumbers, StepNumbers, estimate_bytes
from tests.memory.jobs import gpt_job


@pytest.mark.parametrize(
    ("size", "batch", "length", "is_low", "is_recomputing", "is_foreach"),
    [
        ("tiny", 4, 1024, True, False, True),
        ("tiny", 16, 256, False, False, False),
        ("small", 8, 1024, True, False, False),
        ("small", 4, 256, False, False, True),
        ("small", 16, 512, True, True, False),
        ("medium", 8, 512, False, True, True),
    ],
)
def test_arithmetic_and_trace_agree(
    size: str, batch: int, length: int, is_low: bool, is_recomputing: bool, is_foreach: bool
) -> None:
    options = StepOptions("bf16" if is_low else "fp32", "foreach" if is_foreach else "fused", is_recomputing)
    traced = predict(gpt_job(size, length=length), batch, GPU_MODELS["H200"], options, is_accumulating=False)
    shape = SHAPES[size]
    numbers = GptNumbers(count_parameters(shape), shape.num_layers, shape.num_heads, shape.width, shape.vocab_size)
    told = estimate_bytes(numbers, StepNumbers(batch, length, is_low, is_recomputing, is_foreach))
    assert told == pytest.approx(traced.peak_allocated_bytes - traced.parts["workspace"], rel=0.03)

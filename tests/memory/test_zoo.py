"""Public architectures: the predicted peak is the one that was measured on an H200 (torch 2.11, fused AdamW)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.plan.target import call_model
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import predict

sys.path.append(str(Path(__file__).parents[2] / "bench"))

pytestmark = pytest.mark.xdist_group("transformers")  # imported by one worker
# name, precision, allocated bytes, and how far off it may be
OF_TORCH = [
    ("encoder-causal", "bf16", 2217335296, 0.002),
    ("encoder-causal", "fp32", 2851420160, 0.002),
    ("lstm", "bf16", 2555530240, 0.005),
    ("lstm", "fp32", 3033123328, 0.005),
    ("gru", "bf16", 2531027968, 0.005),
    ("dit", "bf16", 3782926336, 0.002),
    ("graph", "fp32", 3393939456, 0.002),
    ("unet", "fp32", 1371620864, 0.03),
    ("unet", "bf16", 1199995392, 0.03),
]
OF_TRANSFORMERS = [
    ("gpt2", "bf16", 7701478912, 0.002),
    ("gpt-neox", "bf16", 4828996096, 0.002),
    ("mixtral", "fp32", 5178406400, 0.01),
]
MORE_OF_TRANSFORMERS = [
    ("llama", "bf16", 8621449216, 0.002),
    ("llama", "fp32", 14574722560, 0.002),
    ("llama-lora", "bf16", 5442164736, 0.002),
    ("phi3", "bf16", 8352988672, 0.002),
    ("qwen3", "fp32", 15251119616, 0.002),
    ("bert", "bf16", 4486480896, 0.002),
]


def check(name: str, precision: Any, measured_bytes: int, tolerance: float) -> None:
    from memory_zoo_models import zoo  # type: ignore[import-not-found]

    entry = next(entry for entry in zoo() if entry.name == name)
    loss = entry.loss or call_model
    job = Job(name, lambda _: entry.make(), entry.batch, loss, entry.size, StepOptions(precision))
    made = predict(job, entry.size, GPU_MODELS["H200"], is_accumulating=False)
    assert made.peak_allocated_bytes == pytest.approx(measured_bytes, rel=tolerance)
    assert not made.assumptions


@pytest.mark.parametrize(("name", "precision", "measured_bytes", "tolerance"), OF_TORCH)
def test_models_of_torch_need_what_was_predicted(
    name: str, precision: str, measured_bytes: int, tolerance: float
) -> None:
    check(name, precision, measured_bytes, tolerance)


@pytest.mark.parametrize(("name", "precision", "measured_bytes", "tolerance"), OF_TRANSFORMERS)
def test_models_of_transformers_need_what_was_predicted(
    name: str, precision: str, measured_bytes: int, tolerance: float
) -> None:
    pytest.importorskip("transformers")
    check(name, precision, measured_bytes, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "measured_bytes", "tolerance"), MORE_OF_TRANSFORMERS)
def test_more_models_of_transformers_need_what_was_predicted(
    name: str, precision: str, measured_bytes: int, tolerance: float
) -> None:
    pytest.importorskip("transformers")
    check(name, precision, measured_bytes, tolerance)

"""RMSNorm on a GPU: one kernel, nothing in float32 but a number a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jackline.memory.plan.gpus import GPU_MODELS
from jackline.memory.predict.cuda_rules import CudaRules, has_fused_rms_norm, leaf_functions
from jackline.memory.predict.step import predict
from jackline.memory.predict.trace import Recorder
from jackline.trainer.config import resolve_words
from jackline.trainer.network import shape_of
from jackline.trainer.planning.plan import job_of

GIB = 2**30
ROWS, WIDTH = 1024, 512

needs_fused = pytest.mark.skipif(
    not has_fused_rms_norm(), reason="this torch has no fused RMSNorm: it is taken apart"
)


def kept_bytes(dtype: torch.dtype, weight_dtype: torch.dtype, low: torch.dtype | None = None) -> list[int]:
    """Of what a norm makes, its result among it, what lives until backward; the gradients have the right shapes."""
    recorder, rules = Recorder(), CudaRules(low)
    with torch.device("meta"), leaf_functions(), recorder, rules:
        value = torch.empty(ROWS, WIDTH, dtype=dtype, requires_grad=True)
        weight = nn.Parameter(torch.empty(WIDTH, dtype=weight_dtype))
        begin = recorder.mark()
        with rules.autocast():
            out: Tensor = F.rms_norm(value, (WIDTH,), weight, 1e-6)
        kept = recorder.survivors(begin)
        out.sum().backward()
    assert value.grad is not None and value.grad.shape == value.shape and value.grad.dtype == dtype
    assert weight.grad is not None and weight.grad.shape == weight.shape
    allocations = recorder.finish().allocations
    return sorted(allocations[index].num_bytes for index in kept)


@needs_fused
def test_a_norm_keeps_its_input_and_a_number_a_row() -> None:
    # the input is the caller's: the result and the numbers are all that is made
    assert kept_bytes(torch.bfloat16, torch.bfloat16) == [4 * ROWS, 2 * ROWS * WIDTH]
    assert kept_bytes(torch.float32, torch.float32) == [4 * ROWS, 4 * ROWS * WIDTH]


@needs_fused
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own words about it
def test_weight_and_input_of_two_types_are_taken_apart_as_on_a_gpu() -> None:
    assert sum(kept_bytes(torch.bfloat16, torch.float32)) > 8 * ROWS * WIDTH


@needs_fused
def test_under_autocast_it_is_a_norm_like_the_others() -> None:
    """In versions whose list has it: the widened input is kept, and the result is float32."""
    wide, low = kept_bytes(torch.bfloat16, torch.float32, torch.bfloat16), torch.bfloat16
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"):
        assert wide == [4 * ROWS, 4 * ROWS * WIDTH, 4 * ROWS * WIDTH]
    assert kept_bytes(torch.float32, torch.float32, low) == [4 * ROWS, 4 * ROWS * WIDTH]


@needs_fused
def test_the_prediction_of_sparse_attention_meets_what_an_h200_measured() -> None:
    """`jackline train m7c` with a vocabulary of bytes, batch 16 x 1024, bf16 weights: 6.5 GiB allocated."""
    config = resolve_words("m7c", ["--tokenizer", "bytes", "--data", "python-stdlib"]).config
    assert (config.batch_size, config.seq_len) == (16, 1024)
    made = predict(
        job_of(config, shape_of(config, 257), "bf16-weights"), 16, GPU_MODELS["H200"], is_accumulating=False
    )
    assert made.peak_allocated_bytes / GIB == pytest.approx(6.5, rel=0.01)

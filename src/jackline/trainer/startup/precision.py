"""Which numbers a model is trained in, and what has to be set for it. Owns the choice, not the optimizer.

bf16 weights with float32 masters from Ampere on: nothing is cast in the forward pass, and the update loses nothing.
fp16 with a loss scaler on older GPUs, float32 without one. TF32 for what stays float32 on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from jackline import accelerator
from jackline.errors import UsageError
from jackline.memory.plan.gpus import Precision

if TYPE_CHECKING:
    from jackline.trainer.config import TrainConfig

Asked = Literal["auto", "fp32", "bf16", "fp16", "bf16-weights"]
Attention = Literal["auto", "cudnn", "flash", "plain"]
_AMPERE = 8
_HOPPER = 9


def choose_precision(asked: Asked, device: torch.device) -> Precision:
    """What `asked` means on this device; UsageError for what it cannot do."""
    if not accelerator.is_gpu(device):
        if asked == "fp16":
            raise UsageError("fp16 needs a GPU: its loss scaling is of no use on a CPU", hint="use fp32 or bf16")
        return "fp32" if asked == "auto" else asked
    major = accelerator.capability(device)[0]
    if asked == "auto":
        return "bf16-weights" if major >= _AMPERE else "fp16"
    if asked.startswith("bf16") and major < _AMPERE:
        raise UsageError(f"{accelerator.name(device)} (sm_{major}x) has no bf16", hint="precision=fp16, or auto")
    return asked


def settle_precision(config: TrainConfig, chosen: Precision) -> Precision:
    """bf16 weights with masters have an AdamW of their own that clips by the norm; others get autocast instead."""
    is_ours = config.optimizer == "adamw" and config.clip_by == "norm"
    return "bf16" if chosen == "bf16-weights" and not is_ours else chosen


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The context of the forward pass; nothing for fp32 and for bf16 weights."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype=low or torch.bfloat16, enabled=low is not None)


def make_scaler(precision: Precision, device: torch.device) -> Any:
    """A GradScaler for fp16, None otherwise."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


def lower_weights(model: nn.Module, precision: Precision) -> None:
    """In place; masters must have been taken before (`make_optimizer` does both)."""
    if precision == "bf16-weights":
        model.to(torch.bfloat16)


def choose_attention(asked: Attention, device: torch.device) -> Attention:
    """On Hopper cuDNN's kernels: 0.80 ms against flash's 1.07 for a layer of GPT-2 (bench/throughput.py)."""
    if not accelerator.is_gpu(device):
        return "plain"
    if asked in ("cudnn", "flash", "plain"):  # others are kinds of attention that a recipe of ours chooses from
        return asked
    major = accelerator.capability(device)[0]
    return "cudnn" if major >= _HOPPER else "flash" if major >= _AMPERE else "plain"


@contextmanager
def attention_kernels(kind: Attention) -> Iterator[None]:
    """`kind` first, the others where it cannot (head sizes, masks); what was allowed before comes back after.

    Torch's caches of compiled graphs do not know these switches: another kind needs another cache folder.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = {
        "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
        "flash": [SDPBackend.FLASH_ATTENTION],
    }.get(kind, [])
    if not order:
        yield
        return
    order += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield

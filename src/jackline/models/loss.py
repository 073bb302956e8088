"""Cross-entropy over a vocabulary, summed, with all logits at once or in chunks.

The sum and not the mean, because a step cut into slices must be divided by the count of the whole step.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def summed_cross_entropy(head: nn.Module, hidden: Tensor, targets: Tensor, *, chunk_rows: int = 0) -> Tensor:
    """Sum over all targets that are not IGNORED. `hidden` is (..., width), `targets` (...).

    With `chunk_rows` the logits of only that many rows exist at a time; the head's product is done twice for it,
    about 4 % of a small model's step. Gradients are summed in float32 between chunks, because each chunk casts the
    head's weights anew.
    """
    rows, labels = hidden.flatten(0, -2), targets.flatten()
    if not chunk_rows and can_use_kernel(head, rows):
        from jackline.models.loss_kernel import head_loss

        loss: Tensor = head_loss(rows, head.weight, labels)[0]
        return loss
    if not chunk_rows or rows.shape[0] <= chunk_rows:
        return _sum_of(head, rows, labels)
    total = rows.new_zeros((), dtype=torch.float32)
    for part, label in zip(torch.split(rows, chunk_rows), torch.split(labels, chunk_rows), strict=True):
        total = total + checkpoint(_sum_of, head, part, label, use_reentrant=False)
    return total


def can_use_kernel(head: nn.Module, rows: Tensor) -> bool:
    """Whether the one-pass kernel gives this loss: bf16 on a card with Triton, a plain head, and a way back."""
    is_plain = type(head) is nn.Linear and head.bias is None and head.weight.dtype == rows.dtype == torch.bfloat16
    return rows.is_cuda and is_plain and torch.is_grad_enabled() and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _sum_of(head: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
    logits = head(rows)
    if logits.dtype != torch.float32 and not torch.is_autocast_enabled(logits.device.type):
        # Autocast does this by itself. A compiler fuses the cast away; without one it costs 4 bytes a logit.
        logits = logits.float()
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

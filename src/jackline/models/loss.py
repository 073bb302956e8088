"""Summed cross-entropy over a vocabulary, with all logits at once or in chunks.

It returns the sum and not the mean, because the loss of a step cut into slices must be divided by the count of the
whole step.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from jackline import accelerator
from jackline.models import unfilled

IGNORED = -100
_CHECK_ROWS = 16
_CHECK_LIMIT = 0.02  # bf16 has 8 bits of precision; a wrong kernel is off by far more


def summed_cross_entropy(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    *,
    chunk_rows: int = 0,
    has_kernel: bool = False,
    smoothing: float = 0.0,
) -> Tensor:
    """Sum over all targets that are not IGNORED. `hidden` is (..., width), `targets` (...).

    With `chunk_rows` the logits of only that many rows exist at a time. The head's matrix product is then computed
    twice, about 4 % of a small model's step. Gradients are summed in float32 between chunks, because each chunk casts
    the head's weights again. `has_kernel` means that `why_no_kernel` returned no objection for this head. `smoothing`
    is the share of a target that is spread over all tokens.
    """
    rows, labels = hidden.flatten(0, -2), targets.flatten()
    if has_kernel and not chunk_rows and not smoothing and torch.is_grad_enabled():
        from jackline.models.loss_kernel import head_loss

        loss: Tensor = head_loss(rows, head.weight, labels)[0]
        return loss
    if not chunk_rows or rows.shape[0] <= chunk_rows:
        return _sum_of(head, rows, labels, smoothing)
    total = rows.new_zeros((), dtype=torch.float32)
    for part, label in zip(torch.split(rows, chunk_rows), torch.split(labels, chunk_rows), strict=True):
        total = total + checkpoint(_sum_of, head, part, label, smoothing, use_reentrant=False)
    return total


def why_no_kernel(head: nn.Module) -> str:
    """Why the one-pass kernel cannot be used for this head on this machine. Empty when it can: the kernel was run and
    gave the right loss and gradients."""
    if type(head) not in (nn.Linear, unfilled.Linear) or head.bias is not None:
        return "the head is more than one matrix"
    weight = head.weight
    if not accelerator.is_on_gpu(weight) or weight.dtype != torch.bfloat16:
        return "it needs bf16 weights on a GPU"
    try:
        from jackline.models.loss_kernel import head_loss

        # Torch warns about a context that it creates itself. Where warnings are errors, that must not look like a
        # failure of the kernel.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            off = _compare(head, head_loss)
    except Exception as problem:  # no Triton, no compiler, an unknown GPU: plain torch is used instead
        return (
            f"{type(problem).__name__}: {str(problem).strip().splitlines()[0][:100] if str(problem).strip() else ''}"
        )
    return f"it is off by {off:.1%} from the plain loss" if off > _CHECK_LIMIT else ""


def _compare(head: nn.Linear, head_loss: Any) -> float:
    """The largest relative difference of loss and gradients between the kernel and plain operators on a few rows."""
    weight = head.weight.detach().clone().requires_grad_()
    rng_state = torch.Generator(weight.device).manual_seed(1)
    rows = torch.randn(
        _CHECK_ROWS, weight.shape[1], generator=rng_state, device=weight.device, dtype=weight.dtype
    ).requires_grad_()
    labels = torch.randint(0, weight.shape[0], (_CHECK_ROWS,), generator=rng_state, device=weight.device)
    labels[0] = IGNORED
    plain = functional.cross_entropy((rows @ weight.t()).float(), labels, ignore_index=IGNORED, reduction="sum")
    found = head_loss(rows, weight, labels)[0]
    pairs = [(found.detach(), plain.detach())]
    with torch.enable_grad():
        pairs += zip(
            torch.autograd.grad(found, [rows, weight]), torch.autograd.grad(plain, [rows, weight]), strict=True
        )
    return max(float((left.float() - right.float()).norm() / right.float().norm()) for left, right in pairs)


def _sum_of(head: nn.Module, rows: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    logits = head(rows)
    if logits.dtype != torch.float32 and not torch.is_autocast_enabled(logits.device.type):
        # Autocast does this cast by itself. A compiler fuses it away; without one it costs 4 bytes a logit.
        logits = logits.float()
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)

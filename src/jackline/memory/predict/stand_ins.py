"""Operators that PyTorch cannot run on the meta device, or only for some dtypes: the shapes of their results on CUDA.

`shortcuts` owns those that are merely slow there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _grouped_mm(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **options: Any) -> Any:
    """PyTorch's own rule for shapes accepts bf16 only; the kernel also multiplies float32 and float16."""
    if left.dim() == 2 and right.dim() == 2:
        shape = [0 if offsets is None else offsets.shape[0], left.shape[0], right.shape[1]]
    elif left.dim() == 3 and right.dim() == 3:
        shape = [*left.shape[:2], right.shape[2]]
    else:
        shape = [left.shape[-2], right.shape[-1]]
    return torch.empty(shape, dtype=options.get("out_dtype") or left.dtype, device=left.device)


def _ctc_loss(log_probabilities: Tensor, targets: Tensor, *_: Any, **__: Any) -> Any:
    """The loss of each sample, and the table of its alignments, as wide as the longest target can be."""
    steps, batch = log_probabilities.shape[:2]
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // max(1, batch))
    return log_probabilities.new_empty(batch), log_probabilities.new_empty((batch, steps, 2 * longest + 1))


def _ctc_loss_backward(_: Tensor, log_probabilities: Tensor, *__: Any, **___: Any) -> Any:
    return torch.empty_like(log_probabilities)


_aten = torch.ops.aten
STAND_INS: dict[Any, Callable[..., Any]] = {
    _aten._ctc_loss.default: _ctc_loss,
    _aten._ctc_loss.Tensor: _ctc_loss,
    _aten._ctc_loss_backward.default: _ctc_loss_backward,
    _aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    **({_aten._grouped_mm.default: _grouped_mm} if hasattr(_aten, "_grouped_mm") else {}),
}

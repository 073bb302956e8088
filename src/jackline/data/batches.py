"""Batches as torch tensors: the only module here that knows torch, and only when it is called.

Owns the way of a batch to its device: the narrow integers travel (2 bytes a token), and become int64 there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def to_torch(tokens: NDArray[Any], device: str | torch.device = "cpu") -> torch.Tensor:
    """int64 tokens on `device`. From pinned memory (LoaderSettings.pin_memory) the copy does not wait."""
    import torch

    # Signed views, because torch has no arithmetic on unsigned 16 and 32 bit integers; the sign is masked off there.
    signed, mask = (np.int16, 0xFFFF) if tokens.itemsize == 2 else (np.int32, 0xFFFFFFFF)
    narrow = torch.from_numpy(tokens.view(signed)).to(device, non_blocking=True)
    return narrow.long().bitwise_and_(mask)


def inputs_and_targets(
    tokens: torch.Tensor, *, pad_id: int | None = None, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input [:, :-1] and target [:, 1:]. With `pad_id` (rows of per-document mode) padding is not a target:
    after a document's border nothing but padding follows in its row."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if pad_id is not None:
        targets = targets.masked_fill(inputs == pad_id, ignore_index)
    return inputs, targets

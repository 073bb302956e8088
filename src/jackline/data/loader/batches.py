"""Batches as torch tensors: the only module here that knows torch, and only when it is used.

Owns the copy of a batch to its device: the narrow integers are copied (2 bytes a token) and become int64 there, and a
pinned buffer is kept until its copy is over.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jackline import accelerator

if TYPE_CHECKING:
    import torch


class ToDevice:
    """Copies batches to one device, one after the other, without waiting for the GPU.

    torch's pool of pinned memory tracks only copies of tensors that it allocated itself. These tensors are views of a
    buffer that was filled through numpy, so the buffer is held here until a CUDA event after the copy has completed.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._new_event = accelerator.new_event if accelerator.is_gpu(self._device) else None
        self._in_flight: deque[tuple[Any, NDArray[Any]]] = deque()

    def __call__(self, tokens: NDArray[Any]) -> torch.Tensor:
        """int64 tokens on the device."""
        # Signed views, because torch has no arithmetic on unsigned 16 and 32 bit integers; a mask removes the sign.
        signed, mask = (np.int16, 0xFFFF) if tokens.itemsize == 2 else (np.int32, 0xFFFFFFFF)
        narrow = self._torch.from_numpy(tokens.view(signed)).to(self._device, non_blocking=True)
        if self._new_event is not None:
            self._hold(tokens, self._new_event())
        return narrow.long().bitwise_and_(mask)

    def _hold(self, tokens: NDArray[Any], event: Any) -> None:
        event.record()
        self._in_flight.append((event, tokens))
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()


def inputs_and_targets(
    tokens: torch.Tensor, *, pad_id: int | None = None, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input [:, :-1] and target [:, 1:]. With `pad_id` (rows of per-document mode) padding is not a target:
    after a document's border nothing but padding follows in its row."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if pad_id is not None:
        targets = targets.masked_fill(inputs == pad_id, ignore_index)
    return inputs, targets


def empty_buffer(shape: tuple[int, int], dtype: np.dtype[Any], *, pin_memory: bool) -> NDArray[Any]:
    """A buffer for tokens; pinned if asked for and if there is a GPU."""
    if not pin_memory:
        return np.empty(shape, dtype)
    import torch

    if not accelerator.is_available():
        return np.empty(shape, dtype)
    raw = torch.empty(shape[0] * shape[1] * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
    pinned: NDArray[Any] = raw.numpy().view(dtype).reshape(shape)
    return pinned

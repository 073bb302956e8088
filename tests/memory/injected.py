"""Out-of-memory errors where no GPU is: raised inside real operators, in the forward or the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.90 GiB of which 613.56 MiB is"
    " free. Process 4211 has 15.2 GiB memory in use."
)
_HEAVY = ("mm", "addmm", "bmm")


class OutOfMemoryAt(TorchDispatchMode):
    """Raises at every linear layer of more than `max_rows` rows, or once at the `number`-th matrix product."""

    def __init__(
        self, *, max_rows: int | None = None, number: int | None = None, error: Exception | None = None
    ) -> None:
        super().__init__()
        self.num_products = 0
        self.num_raised = 0
        self._max_rows, self._number = max_rows, number
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _HEAVY:
            self.num_products += 1
            # Only addmm, a layer's forward: in a backward product the rows are those of a weight.
            is_too_large = name == "addmm" and self._max_rows is not None and args[1].shape[0] > self._max_rows
            if is_too_large or self.num_products == self._number:
                self.num_raised += 1
                raise self._error or torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))

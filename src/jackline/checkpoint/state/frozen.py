"""Checksums of parameters that do not change, so that they need not be stored in every checkpoint.

A frozen base model under a small trained part is most of the bytes. It is recorded by its hash instead; at resume the
live one must have the same hash. Each tensor is hashed once, since that costs a pass over its bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from jackline.checkpoint.format.hashing import best_algorithm, digest
from jackline.checkpoint.state.dtypes import as_stored

HashTensor = Callable[[Tensor], str]


class FrozenHashes:
    """Caches each tensor's hash as long as the tensor is not changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], str] = {}

    def __call__(self, tensor: Tensor) -> str:
        version = 0 if tensor.is_inference() else tensor._version
        key = (tensor.data_ptr(), version, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in self._known:
            self._known[key] = hash_tensor(tensor)
        return self._known[key]


def hash_tensor(tensor: Tensor) -> str:
    """Hash of its values in logical order, on any device and with any strides. The text names the algorithm."""
    plain = as_stored(tensor.detach()).cpu().contiguous()
    size = plain.numel() * plain.element_size()
    view = memoryview((ctypes.c_ubyte * size).from_address(plain.data_ptr())).cast("B") if size else b""
    algorithm = best_algorithm()
    return f"{algorithm}:{digest(algorithm, view)}"

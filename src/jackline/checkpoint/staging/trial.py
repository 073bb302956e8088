"""Is a state still what was copied? The proof a loop has to give before its copies may overlap (overlap.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from jackline.checkpoint.staging.arena import Arena
from jackline.checkpoint.staging.layout import Layout
from jackline.checkpoint.staging.stage import is_plain_memory
from jackline.checkpoint.state.capture import Source
from jackline.checkpoint.state.dtypes import as_stored


def first_difference(layout: Layout, sources: Sequence[Source], arena: Arena) -> str:
    """The name of a deferred tensor whose bits are not those in the arena; empty when all are equal."""
    for number, source in enumerate(sources):
        if source.is_deferred and not _is_equal(source.tensor, arena, layout.arena[number]):
            return f"{source.key}.{source.name}"
    return ""


def _is_equal(tensor: Tensor, arena: Arena, start: int) -> bool:
    size = tensor.numel() * tensor.element_size()
    if is_plain_memory(tensor):
        compare = ctypes.CDLL(None).memcmp
        compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        return int(compare(tensor.data_ptr(), arena.address + start, size)) == 0
    # As bytes: a NaN equals itself then, and minus zero does not equal zero.
    now = as_stored(tensor).contiguous().reshape(-1).view(torch.uint8)
    return bool(torch.equal(now, arena.tensor[start : start + size].to(now.device)))

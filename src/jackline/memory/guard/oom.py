"""Is this error out of memory, and which numbers does it tell? No torch: texts and types' names only.

Owns the words by which CUDA, cuBLAS, cuDNN and the CPU's allocator say it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jackline.errors import UsageError
from jackline.units import parse_bytes

_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_SIZE = r"([\d.]+ ?(?:[KMGT]i?B|bytes|B))"


def is_out_of_memory(error: BaseException) -> bool:
    """True also for errors that are not of the type but say so, such as a cuBLAS handle that found no room."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


@dataclass(frozen=True)
class OomNumbers:
    """What the error's text says; None where it does not."""

    wanted_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    allocated_bytes: int | None = None  # by PyTorch's tensors in this process
    unused_bytes: int | None = None  # reserved by PyTorch and not in use
    neighbours: tuple[tuple[int, int], ...] = ()  # pid and bytes of other processes on the card


def read_numbers(text: str) -> OomNumbers:
    """'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.9 GiB of which 613.56 MiB is
    free. ...'"""
    return OomNumbers(
        wanted_bytes=_size(rf"Tried to allocate {_SIZE}", text) or _size(r"tried to allocate (\d+ bytes)", text),
        free_bytes=_size(rf"of which {_SIZE} is free", text) or _size(rf"{_SIZE} free", text),
        total_bytes=_size(rf"total capacity of {_SIZE}", text) or _size(rf"{_SIZE} total capacity", text),
        allocated_bytes=_size(rf"{_SIZE} is allocated by PyTorch", text),
        unused_bytes=_size(rf"{_SIZE} is reserved by PyTorch but unallocated", text),
        neighbours=tuple(
            (int(pid), size)
            for pid, words in re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
            if (size := _bytes(words)) is not None
        ),
    )


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return _bytes(found[1]) if found is not None else None


def _bytes(words: str) -> int | None:
    try:
        return parse_bytes(words.replace("bytes", "B"))
    except UsageError:
        return None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

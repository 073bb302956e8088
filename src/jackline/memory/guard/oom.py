"""Whether an error means out of memory, and the numbers in its text. No torch: it reads texts and type names only.

Owns the phrases with which CUDA, cuBLAS, cuDNN and the CPU's allocator report it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jackline.errors import UsageError
from jackline.units import format_bytes, parse_bytes

_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
_SIZE = r"([\d.]+ ?(?:[KMGT]i?B|bytes|B))"


def is_out_of_memory(error: BaseException) -> bool:
    """True also for errors of another type whose text says so, such as cuBLAS failing to allocate a handle."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


@dataclass(frozen=True)
class OomNumbers:
    """The numbers in the error's text; None where it has none. `free_bytes` is what this process could still take:
    under a limit of its own that is less than what the GPU has free."""

    wanted_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    allocated_bytes: int | None = None  # by PyTorch's tensors in this process
    unused_bytes: int | None = None  # reserved by PyTorch and not in use
    neighbours: tuple[tuple[int, int], ...] = ()  # pid and bytes of other processes on the GPU
    allowed_bytes: int | None = None  # by the limit that was set for this process

    def free_text(self) -> str:
        """', 0.6 GiB free of 23.6 GiB'; empty where the error does not say."""
        if self.free_bytes is None:
            return ""
        if self.allowed_bytes is not None:
            whole = f" of the {format_bytes(self.allowed_bytes)} that this process may use"
        else:
            whole = f" of {format_bytes(self.total_bytes)}" if self.total_bytes is not None else ""
        return f", {format_bytes(self.free_bytes)} free{whole}"


def read_numbers(text: str) -> OomNumbers:
    """Read a text such as 'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.9 GiB of
    which 613.56 MiB is free. ...'"""
    allocated_bytes = _size(rf"{_SIZE} is allocated by PyTorch", text)
    unused_bytes = _size(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    free_bytes = _size(rf"of which {_SIZE} is free", text) or _size(rf"{_SIZE} free", text)
    allowed_bytes = _size(rf"{_SIZE} allowed", text)
    if allowed_bytes is not None and allocated_bytes is not None:
        left_bytes = max(0, allowed_bytes - allocated_bytes - (unused_bytes or 0))
        free_bytes = left_bytes if free_bytes is None else min(free_bytes, left_bytes)
    return OomNumbers(
        wanted_bytes=_size(rf"Tried to allocate {_SIZE}", text) or _size(r"tried to allocate (\d+ bytes)", text),
        free_bytes=free_bytes,
        total_bytes=_size(rf"total capacity of {_SIZE}", text) or _size(rf"{_SIZE} total capacity", text),
        allocated_bytes=allocated_bytes,
        unused_bytes=unused_bytes,
        neighbours=tuple(
            (int(pid), size)
            for pid, words in re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
            if (size := _bytes(words)) is not None
        ),
        allowed_bytes=allowed_bytes,
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

"""Huge pages under the tensors of a CPU training, so that the copy beside a step takes a third less of a core.

That copy goes through the kernel, page by page (moves.py), and torch's memory has pages of 4 KiB: 0.31 s of CPU a GB,
against 0.21 s with pages of 2 MiB. After its first copy the memory of each tensor is asked for once, in a thread of
its own; that takes 0.6 s a GB. Values and addresses stay, and memory that is freed meanwhile is an error that does
not matter. A machine whose administrator forbids huge pages is left as it is. Owns that one call.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from pathlib import Path

_HUGE_BYTES = 2 << 20
_PART_BYTES = 64 << 20  # the process cannot map other memory during a part of each call
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1; earlier kernels say EINVAL
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
Stretch = tuple[int, int]  # address, bytes

_advise = ctypes.CDLL(None, use_errno=True).madvise
_advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HugePages:
    """Asks for each stretch of memory once."""

    def __init__(self) -> None:
        self._asked: set[Stretch] = set()

    def want(self, stretches: Iterable[Stretch]) -> threading.Thread | None:
        """Begin with those that are new, and return the thread that does it."""
        new = [stretch for stretch in stretches if stretch not in self._asked and whole_pages(*stretch)[1]]
        self._asked.update(new)
        if not new or not is_allowed():
            return None
        thread = threading.Thread(target=gather, args=(new,), daemon=True, name="jackline-pages")
        thread.start()
        return thread


def gather(stretches: Iterable[Stretch]) -> int:
    """Put each into huge pages; how many bytes are. Ends at the first refusal: memory is short, or the kernel old."""
    total = 0
    for address, size in stretches:
        begin, whole = whole_pages(address, size)
        for start in range(0, whole, _PART_BYTES):
            part = min(_PART_BYTES, whole - start)
            if _advise(begin + start, part, _COLLAPSE):
                return total
            total += part
    return total


def whole_pages(address: int, size: int) -> Stretch:
    """What of it are whole huge pages."""
    begin = -(-address // _HUGE_BYTES) * _HUGE_BYTES
    return begin, max(0, (address + size) // _HUGE_BYTES * _HUGE_BYTES - begin)


def is_allowed(setting: Path = _SETTING) -> bool:
    try:
        return "[never]" not in setting.read_text()
    except OSError:
        return False

"""How much work Python does, counted instead of timed: the number is the same on a busy machine.

CPU time is not: two programs that share a core's caches make each other slower. Times are the benchmarks' business.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


def count_calls(work: Callable[[], object]) -> int:
    """Calls of Python and C functions that `work` makes."""
    number = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return number

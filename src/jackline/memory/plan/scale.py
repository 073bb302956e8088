"""The trace of any batch size from the traces of two: every allocation is a linear function of the micro-batch.

Owns that line. A model whose code takes another path at another batch size has no such line; then `make_line` returns
None and each size must be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jackline.memory.predict.trace import Allocation, Trace


@dataclass(frozen=True)
class Line:
    """Two traces with the same events."""

    first: Trace
    second: Trace
    first_batch: int
    second_batch: int

    def at(self, micro_batch: int) -> Trace:
        """The trace at another micro-batch. It is exact where sizes are linear, which is nearly everywhere."""
        share = (micro_batch - self.first_batch) / (self.second_batch - self.first_batch)
        pairs = zip(self.first.allocations, self.second.allocations, strict=True)
        return replace(self.first, allocations=tuple(self._scaled(a, b, share) for a, b in pairs))

    def _scaled(self, first: Allocation, second: Allocation, share: float) -> Allocation:
        if first.scratch is None or second.scratch is None:
            return replace(first, num_bytes=_between(first.num_bytes, second.num_bytes, share))
        pairs = zip(first.scratch.numbers, second.scratch.numbers, strict=True)
        scratch = replace(first.scratch, numbers=tuple(_between(a, b, share) for a, b in pairs))
        return replace(first, num_bytes=scratch.num_bytes(self.first.processors), scratch=scratch)


def _between(first: int, second: int, share: float) -> int:
    return max(0, round(first + (second - first) * share))


def line_through(trace: Callable[[int], Trace], first_batch: int, second_batch: int) -> Line | None:
    """Trace both. The first trace of a process may have a tensor too many: torch imports its compiler at the first
    operator that needs it, and that import holds on to the operator's arguments. So it is made again where the two
    differ: without a line every batch size would have to be traced."""
    first, second = trace(first_batch), trace(second_batch)
    return make_line(first, first_batch, second, second_batch) or make_line(
        trace(first_batch), first_batch, second, second_batch
    )


def make_line(first: Trace, first_batch: int, second: Trace, second_batch: int) -> Line | None:
    if first.events != second.events or len(first.allocations) != len(second.allocations):
        return None
    return Line(first, second, first_batch, second_batch)

"""From the traces of two batch sizes to any other: every allocation is a straight line in the micro-batch.

Owns the line. A model whose code takes another road at another batch size has no such line; then `scaled` is None
and each size must be traced.
"""

from __future__ import annotations

from dataclasses import dataclass

from jackline.memory.trace import Trace


@dataclass(frozen=True)
class Line:
    """Two traces with the same events."""

    first: Trace
    second: Trace
    first_batch: int
    second_batch: int

    def at(self, micro_batch: int) -> Trace:
        """The trace at another micro-batch, exact where sizes are straight lines, which is nearly everywhere."""
        share = (micro_batch - self.first_batch) / (self.second_batch - self.first_batch)
        pairs = zip(self.first.allocations, self.second.allocations, strict=True)
        sizes = [max(0, round(a.num_bytes + (b.num_bytes - a.num_bytes) * share)) for a, b in pairs]
        return self.first.with_sizes(sizes)


def make_line(first: Trace, first_batch: int, second: Trace, second_batch: int) -> Line | None:
    if first.events != second.events or len(first.allocations) != len(second.allocations):
        return None
    return Line(first, second, first_batch, second_batch)

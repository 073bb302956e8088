"""The table of size x batch x GPU: fits, tight or no. A few traces answer for all GPUs that allocate alike.

Owns which traces are shared. `explain` owns how the table is printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jackline.memory.plan.cards import Card
from jackline.memory.plan.choose import Room, largest_that, room_of
from jackline.memory.plan.scale import Line, make_line
from jackline.memory.predict.allocator import ArenaFull
from jackline.memory.predict.job import Job, StepOptions
from jackline.memory.predict.step import replay, trace_step
from jackline.memory.predict.trace import Trace

_THROUGH = (2, 4)


@dataclass(frozen=True)
class _Kind:
    """GPUs that allocate alike."""

    options: StepOptions
    has_flash: bool
    has_cudnn: bool
    workspace_bytes: int


class Fits:
    """Answers for one job on any GPU. Traces are made once for all GPUs that allocate alike."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lines: dict[tuple[_Kind, bool], Line | None] = {}

    def cell(self, card: Card, batch: int) -> str:
        room, options = room_of(card), self._options(card)
        if self._holds(card, options, batch, room.budget_bytes, is_accumulating=False):
            return "fits"
        smaller = self._largest(card, options, batch, room)
        if smaller:
            return f"at {smaller}"
        is_tight = self._holds(card, options, 1, room.limit_bytes, is_accumulating=batch > 1)
        return "tight" if is_tight else "no"

    def _options(self, card: Card) -> StepOptions:
        asked = self._job.options
        is_automatic = asked.precision in ("bf16", "fp16")
        return replace(asked, precision=card.precision) if is_automatic else asked

    def _largest(self, card: Card, options: StepOptions, batch: int, room: Room) -> int:
        budget = room.budget_bytes
        return largest_that(lambda n: self._holds(card, options, n, budget, is_accumulating=True), batch - 1)

    def _holds(self, card: Card, options: StepOptions, batch: int, cap: int, *, is_accumulating: bool) -> bool:
        trace = self._trace(card, options, batch, is_accumulating)
        try:
            replay(trace, batch, is_expandable=options.is_expandable, cap_bytes=cap)
        except ArenaFull:
            return False
        return True

    def _trace(self, card: Card, options: StepOptions, batch: int, is_accumulating: bool) -> Trace:
        key = (
            _Kind(options, card.has_flash_attention, card.has_cudnn_attention, card.workspace_bytes),
            is_accumulating,
        )
        if key not in self._lines:
            first, second = (
                trace_step(self._job, n, card, options, is_accumulating=is_accumulating) for n in _THROUGH
            )
            self._lines[key] = make_line(first, _THROUGH[0], second, _THROUGH[1])
        line = self._lines[key]
        if line is not None:
            return line.at(batch).on(card.processors)
        return trace_step(self._job, batch, card, options, is_accumulating=is_accumulating)


def fit_table(jobs: dict[str, Job], batches: Iterable[int], cards: list[Card]) -> dict[tuple[str, int, str], str]:
    """(size, batch, GPU) -> 'fits', 'at N', 'tight' or 'no'."""
    cells = {}
    for size, job in jobs.items():
        fits = Fits(job)
        for batch in batches:
            for card in cards:
                cells[size, batch, card.name] = fits.cell(card, batch)
    return cells

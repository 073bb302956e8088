"""Are the batches of a resumed run those of before? Tried once before step 1, and compared for each that comes again.

`rehearse` reads the first batches of data that cannot be rebuilt by us, goes back as a resume would, and reads again.
`SeenBatches` writes down a checksum of every batch and compares those that an earlier attempt had as well.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable
from typing import Any

from jackline.rundir.layout import RunDir
from jackline.rundir.records.seen import SeenBatch, SeenWriter, read_seen
from jackline.session.feeds.feed import END
from jackline.session.feeds.trail import checksum
from jackline.session.phase import phase
from jackline.session.saving.rng import RngState

_NUM_TRIED = 3
_SLOW_S = 10.0  # data this slow are not read twice
Tell = Callable[..., None]  # Reporter.event


def rehearse(feed: Any) -> str:
    """Text when a resume would not give the same batches, or when that is not known; else an empty text."""
    can_rehearse = getattr(feed, "can_rehearse", None)
    if can_rehearse is None:
        return ""
    if not can_rehearse:
        return (
            "it is not known whether a second pass over these data gives the same batches. A resume compares them "
            "and is refused if one differs"
        )
    kept = feed.say, feed.on_difference
    found: list[str] = []
    feed.say, feed.on_difference = (lambda _: None), found.append
    try:
        with RngState().set_aside(), phase("try the data twice"):
            return _rehearse(feed, found)
    except Exception as problem:
        return f"whether these data can be read twice could not be tried ({type(problem).__name__}: {problem})"
    finally:
        feed.say, feed.on_difference = kept
        feed.forget()


def _rehearse(feed: Any, found: list[str]) -> str:
    began_s = time.monotonic()
    first = _read(feed, 0, _NUM_TRIED)
    if time.monotonic() - began_s > _SLOW_S or len(first) < 2:
        return ""
    feed.forget()
    _read(feed, 0, 1)
    state = copy.deepcopy(feed.state())
    feed.forget()
    feed.restore(state)
    if _read(feed, 1, len(first) - 1) == first[1:] and not found:
        return ""
    return (
        "a second pass over these data gives other batches: after a kill, training would continue with others. "
        "Their order must depend on a seed, or the dataset needs state_dict() and load_state_dict()"
    )


def _read(feed: Any, start: int, count: int) -> list[int]:
    feed.open(0, start)
    batches: list[int] = []
    while len(batches) < count and (batch := feed.take()) is not END:
        batches.append(checksum(batch))
    return batches


class SeenBatches:
    """The record of the batches of this run. Without a file (a full disk) nothing is recorded or compared."""

    def __init__(self, run: RunDir, rank: int, tell: Tell) -> None:
        self._path, self._tell = run.seen(rank), tell
        self._before: dict[int, SeenBatch] = {}
        self._writer: SeenWriter | None = None
        self._num_equal = 0
        self._pid = os.getpid()

    def start(self, number: int, *, is_resumed: bool, until: int | None = None) -> None:
        """From batch `number` of the run on; those from `until` on are recorded and not compared."""
        if is_resumed:
            end = math.inf if until is None else until
            known = read_seen(self._path).values()
            self._before = {seen.number: seen for seen in known if number <= seen.number < end}
        with contextlib.suppress(OSError):
            self._writer = SeenWriter(self._path)

    def look(self, number: int, step: int, batch: Any) -> None:
        """The loop gets this batch now."""
        if self._writer is None or os.getpid() != self._pid:
            return
        now = SeenBatch(number, step, checksum(batch))
        before = self._before.pop(number, None)
        self._writer.write(now)
        if before is None:
            return
        if before != now:
            self._before = {}
            self._tell("data_differs", self._words(before, now), is_loud=True, batch=number)
            return
        self._num_equal += 1
        if not self._before:
            text = f"the {self._num_equal} batches that were read again are those recorded before"
            self._tell("data_equal", text, batch=number)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    @staticmethod
    def _words(before: SeenBatch, now: SeenBatch) -> str:
        if before.checksum != now.checksum:
            what = "is not the one that was trained on before"
        else:
            what = f"came in step {now.step + 1}, but in step {before.step + 1} before"
        return f"batch {now.number} of the run (counted from 0) {what}: this resume is not exact"

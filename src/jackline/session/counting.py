"""Counters that a loop keeps itself, and whether they agree with the run's after a resume.

`enumerate(run.steps())` starts at 0 again in every attempt. Where a step ends every fourth batch by such a count, a
resume may shift it. Owns finding that out: by the loop's own line before step 1, and by the number of batches to a
step afterwards. Changes nothing.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_STEADY = 3  # steps of the same length that make a pattern
_ENUMERATED = re.compile(r"\benumerate\s*\(.*\.steps\s*\(")
OWN_BATCHES = (
    "counts batches with enumerate(run.steps()): after a resume that count starts at 0 again. Use run.batch, which "
    "counts the batches of the whole run"
)
OWN_EPOCHS = (
    "this loop counts its epochs itself: after a resume the code between two passes runs again for epochs that are "
    "done, and files it writes are replaced. `for epoch in run.epochs(n)` starts at the right epoch"
)
DRAWN_AHEAD = (
    "random numbers were drawn between attach() and run.steps(). A batch fetched with them is in no checkpoint, "
    "so a resumed run trains on another one: fetch each batch at the beginning of its step"
)
Tell = Callable[[str], None]


class StepLengths:
    """How many batches each step has. Steps that end with an epoch may be shorter and are not compared."""

    def __init__(self) -> None:
        self.tell: Tell = lambda _: None
        self._length = self._num_alike = 0
        self._expected = 0

    def ended(self, num_batches: int, *, is_end_of_epoch: bool) -> None:
        """A step has ended after `num_batches`; 0 at the end of an epoch in which none was left."""
        if not num_batches:
            return
        expected, self._expected = self._expected, 0
        if is_end_of_epoch:
            return
        if expected not in (0, num_batches):
            self.tell(
                f"the first step after the resume has {num_batches} batches, the steps before it had {expected}: "
                "does the loop count batches itself (enumerate)? That count starts at 0 again; run.batch does not"
            )
        self._num_alike = self._num_alike + 1 if num_batches == self._length else 1
        self._length = num_batches

    def state(self) -> dict[str, int]:
        return {"length": self._length, "num_alike": self._num_alike}

    def restore(self, state: Any) -> None:
        if isinstance(state, dict):
            self._length, self._num_alike = int(state["length"]), int(state["num_alike"])
            self._expected = self._length if self._num_alike >= _STEADY else 0


def find_enumerate() -> str:
    """'train.py:41' when the loop that is being entered reads `enumerate(run.steps(...))`; else an empty text."""
    frame: FrameType | None = sys._getframe(1)
    own = __name__.rpartition(".")[0]
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(own):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    if not _ENUMERATED.search(linecache.getline(file, line, frame.f_globals)):
        return ""
    return f"{file.rpartition('/')[2]}:{line}"

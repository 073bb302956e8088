"""Progress reports: what the data package is doing, as plain values for any caller that shows them.

Owns the fields of a report, its rate and its remaining time, and the thread that keeps reports at most a second
apart. Does not own how a report is shown or stored: a terminal, a run directory and a notebook each provide a
`Reporter`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from jackline.units import format_bytes, format_duration

Phase = Literal["list", "download", "tokenise", "pack", "read", "encode", "wait", "done"]
TICK_S = 1.0
_RATE_WINDOW_S = 10.0
_STILL_S = 5.0


@dataclass(frozen=True)
class Progress:
    """One report. `total` is None while it is not known; `detail` names the file or what is waited for."""

    phase: Phase
    done: float = 0
    total: float | None = None
    unit: str = "B"
    rate_per_s: float | None = None
    detail: str = ""

    @property
    def eta_s(self) -> float | None:
        if self.total is None or not self.rate_per_s:
            return None
        return max(0.0, self.total - self.done) / self.rate_per_s

    def to_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "rate_per_s": self.rate_per_s,
            "eta_s": self.eta_s,
            "detail": self.detail,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Progress:
        return Progress(
            value["phase"], value["done"], value["total"], value["unit"], value["rate_per_s"], value["detail"]
        )


Reporter = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """A reporter that drops all reports."""


def describe(progress: Progress) -> str:
    """One line for people: 'tokenise 12.0 MiB of 31.5 MiB (38 %), 2.8 MiB/s, 7.1 s to go, os.py'."""
    amount = _amount(progress.done, progress.unit)
    if progress.phase == "wait" and not progress.done and progress.detail:
        return f"waiting for {progress.detail}"  # "wait 0 files" would be meaningless
    parts = [f"{progress.phase} {amount}"]
    if progress.total:
        share = min(100.0, 100 * progress.done / progress.total)
        parts[0] += f" of {_amount(progress.total, progress.unit)} ({share:.0f} %)"
    if progress.rate_per_s:
        parts.append(f"{_amount(progress.rate_per_s, progress.unit)}/s")
    if progress.eta_s is not None:
        parts.append(f"{format_duration(progress.eta_s)} to go")
    if progress.detail:
        parts.append(progress.detail)
    return ", ".join(parts)


def _amount(value: float, unit: str) -> str:
    return format_bytes(value) if unit == "B" else f"{value:,.0f} {unit}"


class Board:
    """The current report, written by the working threads and read by the reporting thread.

    It is written a few hundred times a second at most, so the cost of the lock cannot be measured.
    """

    def __init__(self, reporter: Reporter = silent, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._clock = clock
        self._lock = threading.Lock()
        self._now = Progress("list", unit="files")
        self._seen: deque[tuple[float, float]] = deque()
        self._moved_at = clock()

    def set(self, phase: Phase, **fields: Any) -> None:
        """Change the report; a change of unit resets the rate."""
        with self._lock:
            if fields.get("unit", self._now.unit) != self._now.unit:
                self._seen.clear()
            if fields.get("done", self._now.done) != self._now.done:
                self._moved_at = self._clock()
            self._now = replace(self._now, phase=phase, **fields)

    def set_total(self, total: float) -> None:
        with self._lock:
            self._now = replace(self._now, total=total)

    def read(self) -> Progress:
        """The report with its rate over the last seconds."""
        with self._lock:
            now, at = self._now, self._clock()
            self._seen.append((at, now.done))
            while len(self._seen) > 2 and at - self._seen[0][0] > _RATE_WINDOW_S:
                self._seen.popleft()
            first_at, first_done = self._seen[0]
            still_s = at - self._moved_at
        if still_s >= _STILL_S and now.phase in ("download", "tokenise", "pack", "encode"):
            now = replace(now, detail=f"{now.detail} (no progress for {format_duration(still_s)})".lstrip())
        rate = (now.done - first_done) / (at - first_at) if now.done > first_done else None
        return replace(now, rate_per_s=rate)

    def report(self) -> None:
        self._reporter(self.read())


@contextlib.contextmanager
def ticking(board: Board, every_s: float = TICK_S) -> Iterator[None]:
    """Report now, every `every_s` while the block runs, and once more at its end.

    A thread does this, so that reports continue during a long call into C or a stalled socket.
    """
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(every_s):
            board.report()

    board.report()
    thread = threading.Thread(target=tick, name="jackline-data-ticker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        board.report()

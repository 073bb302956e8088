"""The contents of session-RANK.json: progress, rate, time left, and what would be lost if the process crashed.

Pure except for the clock it is given. `jackline status` reads it from rank 0's file.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from jackline.session.phase import Phase

WINDOW_S = 60.0


@dataclass
class Pulse:
    """Remembers the last minute's progress to compute the rate."""

    name: str = "start"
    ending: str = ""
    doing: str = ""  # which part of a step: fetch, forward, backward, optimizer, save
    total: int | None = None
    _inner: list[Phase] = field(default_factory=list)
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    _spent_s: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=time.perf_counter)

    def end(self, cause: str) -> None:
        self.ending = cause

    def now(self, doing: str) -> None:
        """Called several times a step, so it only stores `doing` and adds up the time of what ends."""
        at_s = time.perf_counter()
        if self.doing:
            self._spent_s[self.doing] = self._spent_s.get(self.doing, 0.0) + at_s - self._since_s
        self.doing, self._since_s = doing, at_s

    def spent_s(self) -> dict[str, float]:
        """Seconds of this attempt in each part of its steps, the current one included. Any thread may ask."""
        doing, since_s, spent = self.doing, self._since_s, dict(self._spent_s)
        if doing:
            spent[doing] = spent.get(doing, 0.0) + max(0.0, time.perf_counter() - since_s)
        return {name: round(seconds, 3) for name, seconds in spent.items()}

    def inside(self, phase: Phase) -> Phase:
        """Report `phase` as the current activity until it is over."""
        self.now("")
        self._inner.append(phase)
        phase.on_end = lambda: self._inner.remove(phase)
        return phase

    def beat(self, now_s: float, step: int) -> dict[str, Any]:
        """`now_s` is from a monotonic clock."""
        total = self.total
        self._seen.append((now_s, step))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        first_s, first = self._seen[0]
        rate = (step - first) / (now_s - first_s) if now_s > first_s else 0.0
        left = None if total is None else max(0, total - step)
        inner = self._inner[-1] if self._inner else None
        if inner is not None:
            return {**inner.progress(), "rate_per_s": None, "eta_s": None, "ending": None, "doing": None}
        return {
            "phase": self.name,
            "done": step,
            "total": total,
            "unit": "steps",
            "rate_per_s": rate or None,
            "eta_s": left / rate if rate and left is not None else None,
            "ending": self.ending or None,
            "doing": self.doing or None,
        }

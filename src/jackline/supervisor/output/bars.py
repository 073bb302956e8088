"""Which refreshes of progress bars a log gets: enough to follow, not a line for each.

Pure: text and time in, lines for the log out. A bar gets its first state, then one line per 30 s or per step of
10 %, and its last state.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

from jackline.supervisor.output.progress import Progress

EVERY_S = 30.0
STEP_AT_MOST_EVERY_S = 0.9  # short bars that start again and again would fill the log
_MAX_BARS = 64
_VARYING = re.compile(r"[\d.,:%]+|[━╸╺█▏▎▍▌▋▊▉░▒▓#=>*⠀-⣿|/\\-]+")


@dataclass
class _Bar:
    logged: str
    logged_s: float
    logged_tenth: int
    seen_s: float
    pending: str | None = None


class BarFold:
    """The bars of one stream that are being redrawn now."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        self._bars: OrderedDict[str, _Bar] = OrderedDict()
        self._every_s = every_s

    def refresh(self, text: str, progress: Progress | None, now_s: float) -> list[str]:
        """Lines to log because of this refresh."""
        if not text.strip():
            return []
        key = bar_key(text, progress)
        tenth = _tenth(progress)
        bar = self._bars.get(key)
        if bar is None:
            self._bars[key] = _Bar(text, now_s, tenth, now_s)
            return [*self._evict(), text]
        self._bars.move_to_end(key)
        bar.seen_s = now_s
        silent_s = now_s - bar.logged_s
        if silent_s < (self._every_s if tenth == bar.logged_tenth else STEP_AT_MOST_EVERY_S):
            bar.pending = text
            return []
        # A bar that starts again (the next epoch's) has a last state too.
        restarted = [bar.pending] if tenth < bar.logged_tenth and bar.pending else []
        bar.logged, bar.logged_s, bar.logged_tenth, bar.pending = text, now_s, tenth, None
        return [*restarted, text]

    def end(self, text: str, progress: Progress | None) -> bool:
        """A line end closes this bar. True when the log has this very state already (tqdm prints its last twice)."""
        bar = self._bars.pop(bar_key(text, progress), None)
        return bar is not None and bar.pending is None and bar.logged.rstrip() == text.rstrip()

    def overdue(self, now_s: float) -> list[str]:
        """Last states of bars that nobody redraws any more; those bars are forgotten."""
        ended = [key for key, bar in self._bars.items() if now_s - bar.seen_s >= self._every_s]
        bars = [self._bars.pop(key) for key in ended]
        return [bar.pending for bar in bars if bar.pending is not None]

    def flush(self) -> list[str]:
        texts = [bar.pending for bar in self._bars.values() if bar.pending is not None]
        self._bars.clear()
        return texts

    def _evict(self) -> list[str]:
        if len(self._bars) <= _MAX_BARS:
            return []
        _, oldest = self._bars.popitem(last=False)
        return [oldest.pending] if oldest.pending is not None else []


def bar_key(text: str, progress: Progress | None) -> str:
    """What stays the same while a bar moves."""
    if progress is not None:
        return f"{progress.phase}|{progress.unit}|{progress.total}"
    return " ".join(_VARYING.sub(" ", text[:200]).split())[:60]


def _tenth(progress: Progress | None) -> int:
    if progress is None or not progress.total:
        return 0
    return int(10 * min(1.0, progress.done / progress.total))

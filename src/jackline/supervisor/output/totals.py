"""The total of a counter that is printed without one: a percentage beside it, or a setting that was printed before.

Owns where else a total may stand and when it is safe to believe. Every total found here is marked as guessed. Does
not own: totals beside their counter, '12/100' (lines.py, learned.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from jackline.supervisor.output.progress import Progress

_MAX_TEXT = 1000
# 'iteration=54 (22.5%)', 'step 54 [22.5 %]'.
_SHARE = re.compile(
    r"(?<![\w.])(?P<done>\d[\d,_]*)\s?[(\[]\s*(?P<percent>\d{1,3}(?:\.(?P<digits>\d+))?)\s?%[^)\]]{0,12}[)\]]"
)
# 'max_iters = 600', "'total_steps': 600", 'Total optimization steps = 1,000'. Not 'num_steps' and 'eval_iters': those
# are of one rollout or one evaluation.
_SETTING = re.compile(
    r"(?<![\w-])(?:(?:max|total)[_ -](?:(?:train(?:ing)?|optimi[sz]ation|gradient)[_ -])?"
    r"|num_(?:train(?:ing)?|boost)_)(?P<word>step|iter|iteration|update|round)s?['\"]?\s*[:=]\s*['\"]?(?P<total>\d[\d,_]*)(?![\w.])",
    re.IGNORECASE,
)
_MAY_SET = re.compile(r"max|total|num_", re.IGNORECASE)
_STEMS = {"iteration": "iter", "iterations": "iter", "iters": "iter"}
_MIN_LINES = 2  # one percentage may be about anything
_MAX_WIDTH = 0.01  # how far apart the least and the greatest possible total may be


@dataclass
class _Bounds:
    """Between which totals all percentages agree. `least` above `most`: they are not about one total."""

    least: float
    most: float
    first_done: float
    num: int = 1


class Totals:
    """What one command has said about its totals, in order."""

    def __init__(self) -> None:
        self._settings: dict[str, float | None] = {}  # None: it was said twice and not the same, or counted beyond
        self._bounds: dict[str, _Bounds] = {}

    def note(self, text: str) -> None:
        """A line that counts nothing, and may tell a setting."""
        text = text[:_MAX_TEXT]
        if not _MAY_SET.search(text):
            return
        for match in _SETTING.finditer(text):
            stem, total = _stem(match["word"].lower()), _float(match["total"])
            if total > 0:
                self._settings[stem] = total if self._settings.get(stem, total) == total else None

    def fill(self, progress: Progress, text: str) -> Progress:
        """The same report, with a total where one is known."""
        is_bare = progress.source == "line" and progress.total is None and progress.epoch is None
        if not is_bare or progress.unit == "epochs":
            return progress
        total = self._by_share(progress, text) or self._by_setting(progress)
        return replace(progress, total=total, is_guessed=True) if total is not None else progress

    def _by_setting(self, progress: Progress) -> float | None:
        stem = _stem(progress.unit)
        total = self._settings.get(stem)
        if total is not None and progress.done > total:
            self._settings[stem] = total = None
        return total

    def _by_share(self, progress: Progress, text: str) -> float | None:
        is_near = "%" in text and ("(" in text or "[" in text)
        match = _SHARE.search(text[:_MAX_TEXT]) if is_near else None
        if match is None or _float(match["done"]) != progress.done:
            return None
        bounds = self._narrowed(progress, float(match["percent"]), 10.0 ** -len(match["digits"] or ""))
        if bounds is None or bounds.num < _MIN_LINES or bounds.least > bounds.most:
            return None
        if bounds.most - bounds.least > max(1.0, _MAX_WIDTH * bounds.most):
            return None
        found = _roundest(bounds.least, bounds.most)
        return found if found is not None and found >= progress.done else None

    def _narrowed(self, progress: Progress, percent: float, step: float) -> _Bounds | None:
        if not 0 < percent <= 100 or progress.done <= 0:
            return None
        # The share may have been rounded or cut.
        least, most = 100 * progress.done / (percent + step), 100 * progress.done / max(1e-9, percent - step / 2)
        bounds = self._bounds.get(progress.unit)
        if bounds is None:
            self._bounds[progress.unit] = _Bounds(least, most, progress.done)
            return None
        bounds.least, bounds.most = max(bounds.least, least), min(bounds.most, most)
        bounds.num += progress.done != bounds.first_done
        return bounds


def _roundest(least: float, most: float) -> float | None:
    """The whole number between them with the most zeros at its end."""
    for zeros in range(12, -1, -1):
        for step in (10**zeros * 5, 10**zeros):
            found = math.ceil(least / step - 1e-9) * step
            if least - 1e-6 <= found <= most + 1e-6:
                return float(found)
    return None


def _stem(word: str) -> str:
    return _STEMS.get(word, word.removesuffix("s"))


def _float(text: str) -> float:
    return float(text.replace(",", "").replace("_", "") or 0)

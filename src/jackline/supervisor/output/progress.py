"""The progress that a program reports: its type, its pace, and our own protocol.

Owns the rate and the time left that follow from successive reports. Conservative: a number that only looks like
progress is worse than none. Does not own: reading bars (bars.py) and lines (lines.py), or what is shown (cli).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from dataclasses import replace
from typing import Literal

from jackline.immutable import immutable

PROTOCOL = "::jackline "
_MAX_SERIES = 16
MAX_TEXT = 1000  # no bar is longer; a regex never sees more than this

Source = Literal["bar", "protocol", "line"]
Of = Literal["run", "epoch", "bar", "part"]  # a part: one fold, one trial, one task of several


@immutable
class Progress:
    """`done` of `total` `unit`s of one phase. None means unknown. `of`: what `done`, `total` and `eta_s` describe."""

    phase: str
    done: float
    total: float | None
    unit: str
    rate_per_s: float | None
    eta_s: float | None
    source: Source
    of: Of = "run"
    epoch: float | None = None
    epochs: float | None = None
    at_s: float | None = None
    is_guessed: bool = False


_PAIR = re.compile(r"""\s*([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|[^\s"']*)(?=\s|$)""")


_BEFORE_TRAINING = re.compile(
    r"load|checkpoint|shard|restor|fetch|download|extract|map|filter|token|cach|read|import", re.IGNORECASE
)


def is_later_step(before: Progress | None, now: Progress) -> bool:
    """Whether training steps are counted. Bars over loaded shards or over data preparation are not steps."""
    return (
        before is not None
        and before.phase == now.phase
        and now.done > before.done
        and not _BEFORE_TRAINING.search(f"{now.phase} {now.unit}")
    )


def parse_protocol(text: str) -> Progress | None:
    """`::jackline phase=tokenise done=120 total=1000 unit=docs`; None when it is not exactly that."""
    if not text.startswith(PROTOCOL) or len(text) > MAX_TEXT:
        return None
    pairs = _read_pairs(text[len(PROTOCOL) :].rstrip())
    if pairs is None or not ({"phase", "done"} & set(pairs)):
        return None
    try:
        done = _finite(pairs.get("done", "0"))
        total = _finite(pairs["total"]) if pairs.get("total") else None
        rate = _finite(pairs["rate_per_s"]) if pairs.get("rate_per_s") else None
        eta = _finite(pairs["eta_s"]) if pairs.get("eta_s") else None
    except ValueError:
        return None
    return Progress(pairs.get("phase", ""), done, total, pairs.get("unit", ""), rate, eta, "protocol")


class Pace:
    """Turns successive reports into a rate and a time left.

    The rate is the median of the slopes over half the window (Theil-Sen): one compile or one pause for an
    evaluation does not distort it, but recurring pauses are included.
    """

    def __init__(self, *, num_samples: int = 40, spacing_s: float = 0.5) -> None:
        self._num_samples = num_samples
        self._spacing_s = spacing_s
        # One series per bar, since nested bars report alternately.
        self._series: dict[tuple[str, str, float | None], deque[tuple[float, float]]] = {}

    def update(self, progress: Progress, now_s: float) -> Progress:
        """The same report, with the rate and time left filled in where it lacks them and they are known."""
        samples = self._samples_of(progress)
        if samples and progress.done < samples[-1][1]:
            samples.clear()
        if not samples or now_s - samples[-1][0] >= self._spacing_s:
            samples.append((now_s, progress.done))
        if _has_leapt(samples, progress.total):
            # A resumed bar jumps to where it resumes, and counts the jump as work of no time. So does its own rate.
            rate = median_rate(list(samples)[1:])
            return replace(progress, rate_per_s=rate, eta_s=_eta(progress, rate))
        rate = progress.rate_per_s if progress.rate_per_s is not None else median_rate(list(samples))
        eta = progress.eta_s if progress.eta_s is not None else _eta(progress, rate)
        return replace(progress, rate_per_s=rate, eta_s=eta)

    def _samples_of(self, progress: Progress) -> deque[tuple[float, float]]:
        key = (progress.phase, progress.unit, progress.total)
        samples = self._series.pop(key, None)
        self._series[key] = samples = deque(maxlen=self._num_samples) if samples is None else samples
        if len(self._series) > _MAX_SERIES:
            del self._series[next(iter(self._series))]
        return samples


def _has_leapt(samples: deque[tuple[float, float]], total: float | None) -> bool:
    """Whether its first gain is a jump (a resume) and not work: far faster than anything since."""
    if total is None or len(samples) < 2 or samples[0][1] > 0.02 * total:
        return False
    pairs = list(itertools.pairwise(samples))
    if pairs[0][1][1] - pairs[0][0][1] < max(3.0, 0.05 * total):
        return False
    rates = [(after[1] - before[1]) / max(1e-3, after[0] - before[0]) for before, after in pairs]
    return len(rates) == 1 or rates[0] > 3 * max(rates[1:])


def median_rate(samples: list[tuple[float, float]]) -> float | None:
    """Units a second from (time, done) pairs; None while there is only one."""
    reach = max(1, len(samples) // 2)
    slopes = sorted(
        (after[1] - before[1]) / (after[0] - before[0])
        for before, after in zip(samples, samples[reach:], strict=False)
        if after[0] > before[0]
    )
    middle = len(slopes) // 2
    return (slopes[middle] + slopes[~middle]) / 2 if slopes else None


def _read_pairs(text: str) -> dict[str, str] | None:
    pairs: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None:
            return None
        value = match[2]
        if value[:1] == '"':
            value = re.sub(r"\\(.)", r"\1", value[1:-1])
        elif value[:1] == "'":
            value = value[1:-1]
        pairs[match[1]] = value
        at = match.end()
    return pairs


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _eta(progress: Progress, rate: float | None) -> float | None:
    if progress.total is None or not rate or rate <= 0:
        return None
    return max(0.0, progress.total - progress.done) / rate

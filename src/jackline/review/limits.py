"""Whether a run will be done before its time limit, in words for the terminal, the page and the report. Pure."""

from __future__ import annotations

import time

from jackline.immutable import immutable
from jackline.rundir.records.supervisor import ProgressRecord, TimeLimitRecord
from jackline.units import format_duration


@immutable
class Fit:
    """`left_s`: until the run is stopped, or until the platform ends it. `missing_s`: how much longer it would need;
    0 or less fits, None is not known. `reached`: the count it gets to if it does not fit."""

    left_s: float
    is_stopped: bool
    missing_s: float | None = None
    reached: float | None = None

    @property
    def fits(self) -> bool | None:
        return None if self.missing_s is None else self.missing_s <= 0


def judge_fit(limit: TimeLimitRecord, progress: ProgressRecord, now_s: float) -> Fit | None:
    """None without a limit. An ETA of one epoch or one bar says nothing about the end of the run."""
    until_s = limit.ends_at_s if limit.stops_at_s is None else limit.stops_at_s
    if until_s is None:
        return None
    left_s, is_stopped = max(0.0, until_s - now_s), limit.stops_at_s is not None
    eta_s = progress.eta_s
    if eta_s is None or progress.is_part:
        return Fit(left_s, is_stopped)
    needed_s = max(0.0, eta_s - max(0.0, now_s - (progress.at_s or now_s)))
    if needed_s == 0.0 and progress.total and not progress.is_complete:
        return Fit(left_s, is_stopped)  # it takes longer than expected: nobody knows how much
    missing_s, reached = needed_s - left_s, None
    if missing_s > 0 and progress.rate_per_s and progress.done is not None:
        reached = progress.done + progress.rate_per_s * left_s
    return Fit(left_s, is_stopped, missing_s, reached)


def limit_lines(limit: TimeLimitRecord, progress: ProgressRecord, now_s: float, *, is_saving: bool) -> list[str]:
    """When it ends, who ends it, and whether the run fits; [] without a limit. `is_saving`: it saves when stopped."""
    fit = judge_fit(limit, progress, now_s)
    if fit is None:
        return []
    return [
        _end_words(limit, fit, now_s, "stopped and saved" if is_saving else "stopped"),
        *_fit_words(fit, progress),
    ]


def _end_words(limit: TimeLimitRecord, fit: Fit, now_s: float, stopped: str) -> str:
    left = format_duration(fit.left_s)
    if limit.source == "given":
        return f"it is {stopped} in {left} ({_clock(now_s + fit.left_s)})"
    ends_at_s = limit.ends_at_s or now_s
    what = "job" if limit.source == "Slurm" else "session"
    when = "" if limit.is_told else " (its published limit)" if fit.is_stopped else " at the latest"
    text = f"{limit.source} ends this {what} at {_clock(ends_at_s)}{when}"
    if fit.is_stopped:
        return f"{text}; it is {stopped} before, in {left}"
    return f"{text}, in {left}; nothing stops it before: `--time-limit` would"


def _fit_words(fit: Fit, progress: ProgressRecord) -> list[str]:
    if fit.missing_s is None:
        return []
    if fit.fits:
        return ["fits"]
    unit = progress.unit or "steps"
    reached = "" if fit.reached is None else f"; it gets to about {fit.reached:,.0f} {unit}"
    return [f"does not fit: {format_duration(fit.missing_s)} are missing{reached}; `jackline resume` continues"]


def _clock(at_s: float) -> str:
    try:
        return time.strftime("%H:%M UTC", time.gmtime(at_s))
    except (OverflowError, ValueError, OSError):
        return "?"

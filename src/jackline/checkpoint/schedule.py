"""When to save. Pure: the loop passes clock and counter readings in; this decides whether a save is due and why."""

from __future__ import annotations

from dataclasses import dataclass

from jackline.errors import UsageError
from jackline.units import format_duration

MAX_OVERHEAD = 0.005  # share of wall time, for the automatic cadence
SHORTEST_S, LONGEST_S = 30.0, 900.0


@dataclass(frozen=True)
class Cadence:
    """Every so many steps, every so many seconds, or both, whichever comes first; neither means automatic.

    Automatic: as often as keeps the measured cost below 0.5 % of the time, and between 30 s and 15 min apart where
    that limit allows it.
    """

    every_steps: int | None = None
    every_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("save_every_steps", self.every_steps), ("save_every_s", self.every_s)):
            if value is not None and value <= 0:
                raise UsageError(f"{name} = {value} is not a distance", hint="a number above 0, or leave it out")


@dataclass(frozen=True)
class Progress:
    """What the loop knows. `now_s` and `saved_at_s` use the same monotonic clock, so clock changes have no effect.

    Before the first save, `saved_at_s` and `saved_step` are those of the attempt's start. `stall_s` is what one save
    costs the loop and `write_s` how long the writer needs; both are measured, 0 while unknown.
    """

    now_s: float
    step: int
    saved_at_s: float
    saved_step: int
    stall_s: float = 0.0
    write_s: float = 0.0
    is_first: bool = False


def save_is_due(progress: Progress, cadence: Cadence) -> str | None:
    """Why a save is due now, as text for the log; None when none is due."""
    if progress.step <= progress.saved_step:
        return None  # nothing has changed since the last save
    since_s = progress.now_s - progress.saved_at_s
    if (
        cadence.every_steps is not None
        and progress.step // cadence.every_steps > progress.saved_step // cadence.every_steps
    ):
        return f"every {cadence.every_steps} steps"
    if cadence.every_s is not None and since_s >= cadence.every_s:
        return f"every {format_duration(cadence.every_s)}"
    if cadence.every_steps is None and cadence.every_s is None:
        interval_s = automatic_interval_s(progress)
        if since_s >= interval_s:
            return f"automatic, {format_duration(interval_s)} apart"
    return None


def automatic_interval_s(progress: Progress) -> float:
    """Seconds between automatic saves.

    The first save comes early: it shows that saving works on this machine, and it is better to learn that before an
    unattended night. The writer gets twice the time it needs, so that a save seldom finds it busy.
    """
    if progress.is_first:
        return SHORTEST_S
    wanted_s = max(SHORTEST_S, 2 * progress.write_s, progress.stall_s / MAX_OVERHEAD)
    return wanted_s if progress.stall_s / MAX_OVERHEAD > LONGEST_S else min(wanted_s, LONGEST_S)

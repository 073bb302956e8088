"""How a command is stopped: which signals, in which order, and when.

Pure: takes Ctrl-C presses and the time, returns the next signal. Does not own sending (process.py).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import Literal

from jackline.rundir.records.stop_request import StopRequest

Target = Literal["main", "group", "tree"]
GROUP_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Step:
    """One signal to send."""

    signal: int
    target: Target
    text: str


@dataclass(frozen=True)
class Stopping:
    """How far the stop has got. `why` is one of the values of evidence.SentSignal."""

    why: str
    grace_s: float
    presses: int = 0  # Ctrl-C
    stage: int = 0  # how many steps were taken
    last_step_at_s: float = 0.0
    first: int = signal.SIGTERM  # SIGINT for a script that saves on Ctrl-C


# A person at the keyboard decides when to escalate. Other callers get a grace period that is known beforehand.
_BY_PRESS = (
    Step(signal.SIGINT, "main", "sent Ctrl-C (SIGINT) to the main process; press again for SIGTERM to all"),
    Step(signal.SIGTERM, "group", "sent SIGTERM to all its processes; press again to kill them"),
    Step(signal.SIGKILL, "tree", "killed all its processes"),
)
_INTERRUPT = Step(signal.SIGINT, "main", "sent SIGINT (as Ctrl-C does) to the main process")
_BY_CLOCK = (
    Step(signal.SIGTERM, "main", "sent SIGTERM to the main process"),
    Step(signal.SIGTERM, "group", "the grace is over: SIGTERM to all its processes"),
    Step(signal.SIGKILL, "tree", "it did not end: killed all its processes"),
)


def asked_to_stop(request: StopRequest, grace_s: float) -> Stopping:
    """The stop that `jackline stop` asks for; `grace_s` is the run's own setting."""
    own_s = grace_s if request.grace_s is None else request.grace_s
    return Stopping("stop", own_s, first=int(request.signal or signal.SIGTERM))


def press(stopping: Stopping | None, *, grace_s: float) -> Stopping:
    """Count one more Ctrl-C. If a stop by SIGTERM is under way, continue from the stage it has reached."""
    current = stopping or Stopping("ctrl-c", grace_s)
    return replace(current, presses=max(current.presses, current.stage) + 1)


def next_step(stopping: Stopping, now_s: float) -> tuple[Stopping, Step | None]:
    """The signal that is due now, if any."""
    if stopping.stage >= len(_BY_CLOCK):
        return stopping, None
    if stopping.why == "ctrl-c":
        step = _BY_PRESS[stopping.stage] if stopping.presses > stopping.stage else None
    else:
        by_clock = (_INTERRUPT, *_BY_CLOCK[1:]) if stopping.first == signal.SIGINT else _BY_CLOCK
        step = by_clock[stopping.stage] if _is_due(stopping, now_s) else None
    if step is None:
        return stopping, None
    return replace(stopping, stage=stopping.stage + 1, last_step_at_s=now_s), step


def _is_due(stopping: Stopping, now_s: float) -> bool:
    if stopping.stage == 0 or stopping.presses > stopping.stage:
        return True
    patience_s = stopping.grace_s if stopping.stage == 1 else GROUP_PATIENCE_S
    return now_s - stopping.last_step_at_s >= patience_s

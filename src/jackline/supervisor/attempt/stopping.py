"""How a command is stopped: which signals, in which order, and when; and the time limit at which it is.

Decisions are pure: Ctrl-C presses, limits and the time in, the next signal or the limit that counts out. Does not own
sending (process.py).
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any, Literal

from jackline.immutable import immutable
from jackline.machine.host import SessionEnd, find_session_end
from jackline.machine.proc import signal_answer
from jackline.machine.readings import TreeReading
from jackline.rundir.layout import RunDir
from jackline.rundir.records.stop_request import StopRequest, read_stop_request
from jackline.rundir.records.supervisor import TimeLimitRecord
from jackline.supervisor.hang.scene import Verdict
from jackline.supervisor.hang.totals import LAUNCHER_COMMS
from jackline.supervisor.options import SuperviseOptions
from jackline.units import format_duration

# A collective that hangs is ended after this many times --stuck-after; at the alarm where nothing can help any more.
RANKS_PATIENCE = 3.0
Target = Literal["main", "group", "tree"]
GROUP_PATIENCE_S = 5.0
PREEMPTION_GRACE_S = 20.0
ENDING_AFTER_HANDLER_S = 1.0
# How long before the platform's end a run is stopped: to end its step, save, and be uploaded.
LEAD_S, LEAD_WITH_MIRROR_S = 120.0, 300.0
LEAST_LEAD_S = 10.0


@immutable
class Step:
    """One signal to send."""

    signal: int
    target: Target
    text: str


@immutable
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


def stop_asked_for(run: RunDir, grace_s: float) -> tuple[Stopping, str]:
    """How to stop after a SIGTERM to the supervisor, and who asked. `jackline stop` writes a file beside its signal;
    one without it came from the system or others."""
    request = read_stop_request(run)
    if time.time() - (request.at_s or 0.0) < 30.0:
        return asked_to_stop(request, grace_s), request.by or "jackline stop"
    return Stopping("sigterm", min(PREEMPTION_GRACE_S, grace_s)), "SIGTERM to the supervisor"


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


class Asked:
    """What signals have asked of the supervisor itself. SIGUSR1 is how Slurm warns before a time limit
    (`--signal=USR1@300`); every process of the job gets it."""

    def __init__(self) -> None:
        self.presses = self.presses_taken = 0
        self.is_terminated = self.is_warned = False
        self._warned_at_s: float | None = None

    @property
    def is_interrupted(self) -> bool:
        return self.presses > self.presses_taken or self.is_terminated

    def listen(self) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGUSR1, self._on_warning)
        for number in (signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)

    def _on_interrupt(self, _number: int, _frame: Any) -> None:
        self.presses += 1

    def _on_terminate(self, _number: int, _frame: Any) -> None:
        self.is_terminated = True

    def _on_warning(self, _number: int, _frame: Any) -> None:
        self.is_warned = True

    def heed(self, tree: TreeReading, grace_s: float, now_s: float) -> tuple[Stopping | None, str] | None:
        """What to do about SIGUSR1; None while there was none, or for a moment: an interpreter that ends after its
        handler has run has none any more."""
        if not self.is_warned:
            return None
        self._warned_at_s = now_s if self._warned_at_s is None else self._warned_at_s
        stopping, text = heed_warning(tree, grace_s)
        if stopping is not None and now_s - self._warned_at_s < ENDING_AFTER_HANDLER_S:
            return None
        self.is_warned, self._warned_at_s = False, None
        return stopping, text


def heed_warning(tree: TreeReading, grace_s: float) -> tuple[Stopping | None, str]:
    """What to do about SIGUSR1, and what to say. A program with a handler of its own has got the signal too, and may
    have ended by now. A launcher only passes it on."""
    found = [one for one in tree.processes if one.comm not in LAUNCHER_COMMS]
    answers = {one.pid: signal_answer(one.pid, signal.SIGUSR1) for one in found}
    own = next((one for one in found if answers[one.pid] == "caught"), None)
    words = "SIGUSR1, Slurm's warning before a time limit"
    if own is not None:
        return None, f"{words}: process {own.pid} ({own.comm}) handles it itself"
    if all(answer == "unknown" for answer in answers.values()):
        return None, f"{words}: the command ends by itself"
    return Stopping("sigterm", grace_s), f"{words}: the run is stopped, to be resumed"


class StuckWatch:
    """What is done about a run that is stuck: `--on-stuck`. A collective of several ranks that hangs is ended without
    being asked for: torch would end it too, after half an hour."""

    def __init__(self) -> None:
        self._told_since_s: float | None = None

    def judge(self, verdict: Verdict | None, options: SuperviseOptions, now_s: float) -> tuple[str, str]:
        """'report', 'stop' or 'restart', and what to say about it ('' for nothing new)."""
        if verdict is None or verdict.kind != "STUCK":
            return "report", ""
        if options.on_stuck != "report" or options.on_stuck_ranks is None or verdict.rule != "collective":
            return options.on_stuck, ""
        left_s = 0.0 if verdict.is_final else verdict.since_s + RANKS_PATIENCE * options.stuck_after_s - now_s
        if left_s <= 0:
            return options.on_stuck_ranks, "the ranks cannot continue, so the job is ended now"
        if self._told_since_s == verdict.since_s:
            return "report", ""
        self._told_since_s = verdict.since_s
        words = (
            f"if no rank moves, the job is ended in {format_duration(left_s)} (torch would wait for its own timeout)"
        )
        return "report", f"{words}; `--on-stuck report` forbids it"


@immutable
class TimeLimit:
    """The moments are time.monotonic(), which nobody can set. `stops_s` None: the limit is only shown."""

    source: str  # 'given' or the platform
    ends_s: float
    stops_s: float | None
    is_told: bool = False


def choose_limit(
    given_s: float | None, session: SessionEnd | None, *, grace_s: float, is_mirrored: bool, now: Clocks
) -> TimeLimit | None:
    """The limit that counts. A given one replaces what is only computed from what a platform publishes, because the
    user may know better; what the platform has told about this very job holds beside it."""
    given = None if given_s is None else TimeLimit("given", now.steady_s + given_s, now.steady_s + given_s)
    if session is None or (given is not None and not session.is_told):
        return given
    left_s = session.ends_at_s - now.at_s
    lead_s = LEAD_WITH_MIRROR_S if is_mirrored else LEAD_S
    lead_s = min(lead_s, max(grace_s + LEAST_LEAD_S, left_s / 10), left_s / 2)
    ends_s = now.steady_s + left_s
    found = TimeLimit(session.platform, ends_s, ends_s - lead_s if session.is_firm else None, session.is_told)
    return given if given is not None and given.ends_s <= (found.stops_s or found.ends_s) else found


@immutable
class Clocks:
    """One moment: time.monotonic() and time.time()."""

    steady_s: float
    at_s: float


def read_clocks() -> Clocks:
    return Clocks(time.monotonic(), time.time())


class LimitWatch:
    """The time limit of the command that a supervisor starts or takes over."""

    def __init__(self, options: SuperviseOptions) -> None:
        now = read_clocks()
        self._given_s = options.time_limit_s
        self.limit = choose_limit(
            options.time_limit_s,
            find_session_end(os.environ, now_s=now.at_s),
            grace_s=options.grace_s,
            is_mirrored=options.mirror is not None,
            now=now,
        )

    def recall(self, record: TimeLimitRecord) -> None:
        """Continue with the limit of the supervisor before this one: taking over a command gives it no more time."""
        if record.source is None or record.ends_at_s is None:
            return
        now = read_clocks()
        stops_s = None if record.stops_at_s is None else now.steady_s + record.stops_at_s - now.at_s
        ends_s = now.steady_s + record.ends_at_s - now.at_s
        self.limit = TimeLimit(record.source, ends_s, stops_s, bool(record.is_told))

    def record(self) -> TimeLimitRecord:
        if self.limit is None:
            return TimeLimitRecord()
        now, stops_s = read_clocks(), self.limit.stops_s
        stops_at_s = None if stops_s is None else round(now.at_s + stops_s - now.steady_s, 1)
        ends_at_s = round(now.at_s + self.limit.ends_s - now.steady_s, 1)
        return TimeLimitRecord(self.limit.source, stops_at_s, ends_at_s, self.limit.is_told)

    def reached(self, now_s: float) -> str:
        """What to say when the command has to be stopped; '' before that."""
        limit = self.limit
        if limit is None or limit.stops_s is None or now_s < limit.stops_s:
            return ""
        if limit.source == "given":
            return f"the time limit of {format_duration(self._given_s or 0.0)} is reached"
        left_s = max(0.0, limit.ends_s - now_s)
        moment = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() + left_s))
        what = "this job" if limit.source == "Slurm" else "this session"
        return (
            f"{limit.source} ends {what} at {moment}, in {format_duration(left_s)}: stopping now, so that it can save"
        )

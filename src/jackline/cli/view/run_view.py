"""A run as `status`, `runs` and their `--json` see it: every file is read once, every value is checked.

Owns reading; the wording is in cli/text/status.py. State files may be damaged or written by another version:
rundir/records decides what counts then.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from jackline.checkpoint.place import choose_place
from jackline.diagnosis.logs.curves import Curves, read_curves
from jackline.diagnosis.logs.verdict import LogFacts, LogVerdict, judge_log, read_log_facts
from jackline.immutable import immutable
from jackline.machine.disk import used_bytes
from jackline.rundir import atomic
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import is_alive, read_state
from jackline.rundir.records.fields import number
from jackline.rundir.records.mirror import MirrorRecord, read_mirror
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.records.supervisor import ProgressRecord, SupervisorRecord
from jackline.rundir.run_file import DamagedRun, RunFile, read_run_file
from jackline.rundir.status import RunStatus, read_status

if TYPE_CHECKING:
    from jackline.cli.text.resume import NextStart

LIVE = ("alive", "unwatched")


@immutable
class Pause:
    """A live run that was stopped by a signal or is held by a debugger; `since_s` is time.time()."""

    text: str
    since_s: float | None


@immutable
class RunView:
    """Everything that is shown about one run. `problem` is why run.json could not be read."""

    name: str
    path: str
    status: RunStatus
    contents: RunFile | None
    problem: str
    session: SessionRecord
    log: LogFacts
    log_verdict: LogVerdict
    now_s: float
    curves: Curves
    pause: Pause | None = None
    disk_used_bytes: int | None = None  # only for a run with a disk budget, because it walks through the run's folder
    mirrors: tuple[MirrorRecord, ...] = ()  # of the command's own checkpoints, and of Jackline's
    goodput: str = ""  # only for `status`, because it reads what the run did all its time
    next_start: NextStart | None = None  # only for `status`, because it searches the disk for checkpoints

    @property
    def disk_budget(self) -> int | None:
        """The most disk space that the run may take, as its session or its supervisor was told."""
        told = self.session.disk_budget or number(self.state.options.get("disk_budget"))
        return int(told) if told else None

    @property
    def is_live(self) -> bool:
        return self.status.state in LIVE or self.status.is_heard_afar

    @property
    def state(self) -> SupervisorRecord:
        """supervisor.json of the last attempt."""
        return self.status.supervisor_state

    @property
    def started_at_s(self) -> float | None:
        """When the last attempt began."""
        return self.status.exit.started_at_s or self.state.started_at_s

    @property
    def running_s(self) -> float | None:
        """How long the last attempt has run, or ran."""
        if self.status.exit.is_there:
            return self.status.exit.duration_s
        if self.started_at_s is None:
            return None
        end_s = self.now_s if self.is_live else self.status.last_seen_at_s
        return None if end_s is None else max(0.0, end_s - self.started_at_s)

    @property
    def progress(self) -> ProgressRecord:
        """The progress from the session inside; without one, that read from the output."""
        return self.session.progress if self.session.done is not None else self.state.progress


def wall_clock_s() -> float:
    """The only place that reads the clock; tests replace it."""
    return time.time()


def read_view(run: RunDir, *, now_s: float, is_short: bool = False) -> RunView:
    """`is_short`: without mirrors and the age of curves, which a list of runs does not show."""
    status = read_status(run, now_s=now_s)
    contents, problem = None, ""
    try:
        contents = read_run_file(run)
    except DamagedRun as error:
        problem = error.message
    log = read_log_facts(run, status)
    view = RunView(
        name=contents.name if contents else run.name,
        path=str(run.path),
        status=status,
        contents=contents,
        problem=problem,
        session=_read_session(run),
        log=log,
        log_verdict=LogVerdict("absent", ""),
        now_s=now_s,
        curves=Curves() if is_short else read_curves(run),
        mirrors=() if is_short else _read_mirrors(run),
    )
    is_live = None if status.state == "elsewhere" and not view.is_live else view.is_live
    pause = _read_pause(view) if view.is_live else None
    verdict = judge_log(log, is_live=is_live, running_s=view.running_s, now_s=now_s)
    used = used_bytes(run.path) if view.disk_budget is not None else None
    return RunView(**{**view.__dict__, "log_verdict": verdict, "pause": pause, "disk_used_bytes": used})


def _read_mirrors(run: RunDir) -> tuple[MirrorRecord, ...]:
    return read_mirror(run.mirror_file), read_mirror(choose_place(run).folder / "mirror.json")


def _read_pause(view: RunView) -> Pause | None:
    """The supervisor's verdict; without a supervisor, what the kernel says about the main process now."""
    status, verdict = view.status, view.state.verdict
    if status.is_heard_afar or (status.state == "alive" and not status.is_stale):
        is_dated = status.last_seen_at_s is not None and verdict.for_s is not None
        since_s = (status.last_seen_at_s or 0.0) - (verdict.for_s or 0.0) if is_dated else None
        return Pause(verdict.text or "paused", since_s) if verdict.is_pause else None
    if status.child is None or not is_alive(status.child):
        return None
    state = read_state(status.child.pid)
    if state not in ("T", "t"):
        return None
    # Its own last heartbeat was written just before the pause.
    return Pause("paused (SIGSTOP)" if state == "T" else "paused (by a debugger)", view.session.at_s)


def _read_session(run: RunDir) -> SessionRecord:
    """The record of the lowest rank that can be read; it represents all ranks."""
    for path in run.session_files():
        found = SessionRecord.from_json(atomic.read_json(path))
        if found.is_there:
            return found
    return SessionRecord()

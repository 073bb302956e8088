"""Whether a run is alive, watched, stopped, finished or dead, from pids, start times and exit files only.

Owns the rules in docs/RUN_FORMAT.md "alive"; works on a copied run directory. Does not own wording for people.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from jackline.immutable import immutable
from jackline.rundir.access.trust import is_believable
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.process_id import ProcessId, host_name, is_alive
from jackline.rundir.records.exit import ExitRecord, read_exit
from jackline.rundir.records.session import read_session
from jackline.rundir.records.start import StartRecord, read_start
from jackline.rundir.records.supervisor import SupervisorRecord, read_supervisor
from jackline.rundir.registry import is_copy

if TYPE_CHECKING:  # importing it costs 11 ms; only code that starts runs needs its dataclasses
    from jackline.rundir.identity import State

STALE_AFTER_S = 10.0
AFAR_STALE_AFTER_S = 60.0  # a shared file system may show its files that late, and clocks differ
COPY_STALE_AFTER_S = 180.0  # records reach a mirror once a minute


@immutable
class RunStatus:
    """What the files and the kernel say about a run right now."""

    state: State
    attempt: int
    child: ProcessId | None
    supervisor: ProcessId | None
    last_seen_at_s: float | None
    is_stale: bool
    exit_code: int | None
    supervisor_state: SupervisorRecord
    exit: ExitRecord
    is_bare: bool = False  # its last attempt was started without a supervisor

    @property
    def is_heard_afar(self) -> bool:
        """Whether it lives on another machine, as far as its newest records say."""
        return self.state == "elsewhere" and not self.is_stale

    @property
    def end_words(self) -> str:
        """'has finished', 'was stopped', 'crashed', 'was killed': for 'run X is not running: it ...'."""
        if self.state == "dead":
            return self.exit.word if self.exit.is_there else "is gone, and nobody saw how it ended"
        known = {"finished": "has finished", "stopped": "was stopped", "empty": "never started"}
        return known.get(self.state, f"is {self.state}")


def read_status(run: RunDir, *, attempt: int | None = None, now_s: float | None = None) -> RunStatus:
    """Never raises for damaged state files: what cannot be read counts as absent. `attempt`: an earlier attempt."""
    now = time.time() if now_s is None else now_s
    last = run.last_attempt()
    is_earlier = attempt is not None and last is not None and attempt != last.number
    state_file = SupervisorRecord() if is_earlier else read_supervisor(run)
    return _status(run, run.attempt(attempt) if is_earlier and attempt else last, state_file, now)


def last_beat_s(run: RunDir) -> float | None:
    """The newest heartbeat of its supervisor or its sessions, on the clock of the machine that wrote it."""
    ranks = [int(path.stem.removeprefix("session-")) for path in run.session_files()]
    beats = [read_supervisor(run).at_s, *(read_session(run, rank).at_s for rank in ranks)]
    return max((at_s for at_s in beats if at_s is not None), default=None)


def _status(run: RunDir, attempt: AttemptDir | None, state_file: SupervisorRecord, now: float) -> RunStatus:
    start = read_start(attempt) if attempt else StartRecord()
    exit_file = read_exit(attempt) if attempt else ExitRecord()
    last_seen = state_file.at_s
    named = (start.child, state_file.supervisor)
    # A file may name any process. One that belongs to another user than the run is not its process.
    is_here = not is_copy(run)
    child, supervisor = ((one if is_believable(one, run) else None) if is_here else _afar(one) for one in named)
    state = _state(attempt, child, supervisor, exit_file, state_file, is_here=is_here)
    return RunStatus(
        state=state,
        attempt=attempt.number if attempt else 0,
        child=child,
        supervisor=supervisor,
        last_seen_at_s=last_seen,
        is_stale=last_seen is None or now - last_seen > stale_after_s(run, is_afar=state == "elsewhere"),
        exit_code=exit_file.exit_code,
        supervisor_state=state_file,
        exit=exit_file,
        is_bare=bool(start.is_bare),
    )


def stale_after_s(run: RunDir, *, is_afar: bool) -> float:
    """How old the newest heartbeat of a live run may be."""
    if is_copy(run):
        return COPY_STALE_AFTER_S
    return AFAR_STALE_AFTER_S if is_afar else STALE_AFTER_S


def _state(
    attempt: AttemptDir | None,
    child: ProcessId | None,
    supervisor: ProcessId | None,
    exit_file: ExitRecord,
    state_file: SupervisorRecord,
    *,
    is_here: bool,
) -> State:
    is_over = (
        state_file.is_finished and exit_file.is_there and state_file.attempt == (attempt.number if attempt else 0)
    )
    if is_alive(supervisor) and not is_over:
        return "alive"  # also between two attempts, while the supervisor waits to restart
    if is_alive(child):
        return "unwatched"
    if exit_file.is_there and not state_file.is_restarting:
        return _ended(exit_file)
    known = child or supervisor
    if known is not None and not (is_here and known.host == host_name()):
        return "elsewhere"
    if attempt is None:
        return "empty" if supervisor is None else "dead"
    return _ended(exit_file) if exit_file.is_there else "dead"


def _afar(process: ProcessId | None) -> ProcessId | None:
    """A process that a copy of records names, so that none of this machine is taken for it: who has written there may
    have any, and machines may have the same name."""
    return process and ProcessId(process.pid, process.start_ticks, process.host, "")


def _ended(exit_file: ExitRecord) -> State:
    if exit_file.was_stopped:
        return "stopped"
    return "finished" if exit_file.exit_code == 0 else "dead"

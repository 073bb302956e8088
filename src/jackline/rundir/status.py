"""Is a run alive, watched, stopped, finished or dead? Told from pids, start times and exit files alone.

Owns the laws in docs/RUN_FORMAT.md "alive"; works on a copied run directory. Does not own wording for people.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackline.errors import EXIT_STOPPED
from jackline.rundir import atomic
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.process_id import ProcessId, host_name, is_alive

if TYPE_CHECKING:  # its dataclasses are for those who start runs: 11 ms
    from jackline.rundir.identity import State

STALE_AFTER_S = 10.0


@dataclass(frozen=True)
class RunStatus:
    """What the files and the kernel say of a run right now."""

    state: State
    attempt: int
    child: ProcessId | None
    supervisor: ProcessId | None
    last_seen_at_s: float | None
    is_stale: bool
    exit_code: int | None
    supervisor_state: dict[str, Any]
    exit: dict[str, Any]


def read_status(run: RunDir, *, attempt: int | None = None, now_s: float | None = None) -> RunStatus:
    """Never raises for damaged state files: what cannot be read is absent. `attempt` asks for an earlier one."""
    now = time.time() if now_s is None else now_s
    last = run.last_attempt()
    is_earlier = attempt is not None and last is not None and attempt != last.number
    state_file = {} if is_earlier else _dict(atomic.read_json(run.supervisor_file))
    return _status(run.attempt(attempt) if is_earlier and attempt else last, state_file, now)


def _status(attempt: AttemptDir | None, state_file: dict[str, Any], now: float) -> RunStatus:
    start = _dict(atomic.read_json(attempt.start_file)) if attempt else {}
    exit_file = _dict(atomic.read_json(attempt.exit_file)) if attempt else {}
    child = ProcessId.from_json(start.get("child"))
    supervisor = ProcessId.from_json(state_file.get("supervisor"))
    seen = state_file.get("at_s")
    last_seen = float(seen) if isinstance(seen, int | float) else None
    return RunStatus(
        state=_state(attempt, child, supervisor, exit_file, state_file),
        attempt=attempt.number if attempt else 0,
        child=child,
        supervisor=supervisor,
        last_seen_at_s=last_seen,
        is_stale=last_seen is None or now - last_seen > STALE_AFTER_S,
        exit_code=_exit_code(exit_file),
        supervisor_state=state_file,
        exit=exit_file,
    )


def _state(
    attempt: AttemptDir | None,
    child: ProcessId | None,
    supervisor: ProcessId | None,
    exit_file: dict[str, Any],
    state_file: dict[str, Any],
) -> State:
    if is_alive(supervisor):
        return "alive"  # also between two attempts, while it waits to restart
    if is_alive(child):
        return "unwatched"
    if exit_file and not state_file.get("is_restarting"):
        return _ended(exit_file)
    if attempt is None:
        return "empty" if supervisor is None else "dead"
    known = child or supervisor
    if known is not None and known.host != host_name():
        return "elsewhere"
    return _ended(exit_file) if exit_file else "dead"


def _ended(exit_file: dict[str, Any]) -> State:
    code = _exit_code(exit_file)
    if code == EXIT_STOPPED or exit_file.get("is_stopped"):
        return "stopped"
    if code == 0:
        return "finished"
    return "dead"


def _exit_code(exit_file: dict[str, Any]) -> int | None:
    code = exit_file.get("exit_code")
    return code if isinstance(code, int) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

"""Writes timeline.jsonl: what the run was doing, from its first second to its last, and with which code.

Owns when a line is due. Fails open: a line that cannot be written is dropped.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from jackline.errors import JacklineError
from jackline.rundir.jsonl import JsonlWriter
from jackline.rundir.layout import RunDir
from jackline.rundir.records.session import SessionRecord, read_session
from jackline.rundir.records.supervisor import SupervisorRecord
from jackline.rundir.records.timeline import TimelineRecord
from jackline.rundir.run_file import read_run_file
from jackline.supervisor.surroundings import Surroundings

SOON_S = 10.0  # between two lines when nothing changes, in the first hour of a supervisor
LATER_S = 60.0
FIRST_HOUR_S = 3600.0
APART_S = 5.0  # between two changes after that hour: something that alternates must not fill the disk


class Timeline:
    """The only writer of the file, for one attempt. `note` is called each second."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._writer: JsonlWriter | None = None
        self._began_s: float | None = None
        self._last: TimelineRecord | None = None
        self._surroundings: Surroundings | None = None

    def note(self, state: SupervisorRecord, *, is_last: bool = False) -> None:
        line = make_line(state, read_session(self._run))
        self._look_around(state)
        self._began_s = line.at_s if self._began_s is None else self._began_s
        if is_last or is_due(self._last, line, age_s=(line.at_s or 0.0) - (self._began_s or 0.0)):
            self._last = line
            with contextlib.suppress(OSError):
                self._writer = self._writer or JsonlWriter(self._run.timeline)
                self._writer.append(replace(line, is_last=True if is_last else None).to_json())
        if is_last and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _look_around(self, state: SupervisorRecord) -> None:
        if self._surroundings is None and state.attempt is not None:
            with contextlib.suppress(JacklineError, OSError):
                cwd = Path(read_run_file(self._run).cwd)
                self._surroundings = Surroundings(self._run.attempt(state.attempt), cwd)
        if self._surroundings is not None and state.child is not None:
            age_s = (state.at_s or 0.0) - (state.started_at_s or 0.0)
            self._surroundings.look(state.child.pid, age_s)


def is_due(last: TimelineRecord | None, line: TimelineRecord, *, age_s: float) -> bool:
    if last is None or last.attempt != line.attempt:
        return True
    passed_s = (line.at_s or 0.0) - (last.at_s or 0.0)
    has_changed = (last.verdict, last.phase) != (line.verdict, line.phase)
    if last.phase is None:
        has_changed = has_changed or last.what != line.what
    is_young = age_s < FIRST_HOUR_S
    return (has_changed and (is_young or passed_s >= APART_S)) or passed_s >= (SOON_S if is_young else LATER_S)


def make_line(state: SupervisorRecord, session: SessionRecord) -> TimelineRecord:
    """The session knows its own phases; for a script without one there are its output and its stacks."""
    is_attached = session.attempt is not None and session.attempt == state.attempt
    progress = session.progress if is_attached else state.progress
    gpu_bytes = [gpu.used_bytes for gpu in state.gpu if gpu.used_bytes is not None]
    return TimelineRecord(
        at_s=round(state.at_s, 3) if state.at_s is not None else None,
        attempt=state.attempt,
        verdict=state.verdict.kind,
        phase=progress.phase,
        what=state.now.what,
        step=session.step if is_attached else progress.done,
        total=progress.total,
        spent_s={name: session.spent_s[name] for name in ("fetch", "save") if name in session.spent_s}
        if is_attached
        else {},
        still_s=state.verdict.for_s if state.verdict.is_alarm else None,
        used_bytes=state.memory.own_bytes or state.memory.used_bytes,
        gpu_bytes=sum(gpu_bytes) if gpu_bytes else None,
        cpu_cores=state.cpu_cores,
    )

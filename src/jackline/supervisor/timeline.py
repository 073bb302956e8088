"""Writes timeline.jsonl: what the run was doing, from its first second to its last, and with which code.

Owns when a line is due, and surroundings.json and code.diff of the attempt: its code and packages, so that two runs
can be compared later. Fails open: what cannot be read or written is missing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from jackline.errors import JacklineError
from jackline.machine.proc import list_tree
from jackline.machine.procfs import list_packages, package_folders
from jackline.rundir.jsonl import JsonlWriter
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.records.session import SessionRecord, read_session
from jackline.rundir.records.supervisor import ProgressRecord, SupervisorRecord
from jackline.rundir.records.surroundings import SurroundingsRecord, write_surroundings
from jackline.rundir.records.timeline import TimelineRecord
from jackline.rundir.run_file import read_diff, read_git, read_run_file
from jackline.supervisor.output.journey import is_aside

LOOKS_S = (3.0, 15.0, 60.0)  # after the start: imports come one after another
MAX_DIFF_BYTES = 1 << 20


class Surroundings:
    """One attempt's. `look` is called each second and returns at once: git may be slow, so a thread asks it."""

    def __init__(self, attempt: AttemptDir, cwd: Path) -> None:
        self._attempt, self._cwd = attempt, cwd
        self._folders: dict[str, None] = {}
        self._git: dict[str, object] | None = None
        self._num_looks = 0
        self._thread: threading.Thread | None = None

    def look(self, pid: int | None, age_s: float) -> None:
        is_due = self._num_looks < len(LOOKS_S) and age_s >= LOOKS_S[self._num_looks]
        if pid is None or not is_due or (self._thread is not None and self._thread.is_alive()):
            return
        self._num_looks += 1
        self._thread = threading.Thread(target=self._record, args=(pid,), daemon=True, name="jackline-surroundings")
        self._thread.start()

    def _record(self, pid: int) -> None:
        with contextlib.suppress(Exception):
            before = len(self._folders)
            self._folders.update(dict.fromkeys(package_folders(list_tree(pid))))
            is_first = self._git is None
            if is_first:
                self._git = read_git(self._cwd)
                self._keep_diff()
            if is_first or len(self._folders) > before:
                folders = tuple(self._folders)
                record = SurroundingsRecord(time.time(), dict(list_packages(folders)), folders, dict(self._git or {}))
                write_surroundings(self._attempt, record)

    def _keep_diff(self) -> None:
        """The uncommitted changes themselves: their hash says only that there were some."""
        diff = read_diff(self._cwd) if (self._git or {}).get("is_dirty") else ""
        if diff:
            fd = os.open(self._attempt.code_diff, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
                file.write(diff.encode("utf-8", "surrogateescape")[:MAX_DIFF_BYTES])


_NO_STEPS = frozenset(
    {"b", "bytes", "byte", "kb", "mb", "gb", "kib", "mib", "gib", "%", "docs", "documents", "files", "shards", "rows"}
)
SOON_S = 10.0  # between two lines when nothing changes, in the first hour of a supervisor
LATER_S = 60.0
FIRST_HOUR_S = 3600.0
APART_S = 5.0  # between two changes after that hour: something that alternates must not fill the disk


class Timeline:
    """The only writer of the file, for one attempt. `note` is called each second."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._session = str(run.session_file(0))
        self._writer: JsonlWriter | None = None
        self._began_s: float | None = None
        self._last: TimelineRecord | None = None
        self._surroundings: Surroundings | None = None

    def note(self, state: SupervisorRecord, *, is_last: bool = False) -> None:
        # Without a session there is no such file, and asking for its name is ten times cheaper than failing to read.
        is_there = os.path.exists(self._session)
        line = make_line(state, read_session(self._run) if is_there else SessionRecord())
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
        step=session.step if is_attached else progress.done if counts_steps(progress) else None,
        total=progress.total,
        spent_s={name: session.spent_s[name] for name in ("fetch", "save") if name in session.spent_s}
        if is_attached
        else {},
        still_s=state.verdict.for_s if state.verdict.is_alarm else None,
        used_bytes=state.memory.own_bytes or state.memory.used_bytes,
        gpu_bytes=sum(gpu_bytes) if gpu_bytes else None,
        cpu_cores=state.cpu_cores,
        is_part=True if not is_attached and progress.is_part else None,
    )


def counts_steps(progress: ProgressRecord) -> bool:
    """Whether `done` grows with the training. Bytes, documents and percents are counted too, and so is what a script
    loads or evaluates."""
    return (progress.unit or "").lower() not in _NO_STEPS and not is_aside(progress.phase or "")

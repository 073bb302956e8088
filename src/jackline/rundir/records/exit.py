"""exit.json and findings.json: how an attempt ended and what was concluded from it.

Written by the supervisor, or by the session of an attempt that has none.
"""

from __future__ import annotations

import contextlib
from typing import Any

from jackline.errors import EXIT_STOPPED
from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import FORMAT, AttemptDir
from jackline.rundir.records.fields import decode, encode, left_out

_ENDED_BY_US = ("stuck", "memory_guard", "time_limit")
_KILLED = ("kernel_oom", "killed_by_someone", "preempted", "timed_out", "other_signal")
_CRASHED = ("segfault", "abort", "bus_error")


@immutable
class ExitRecord:
    """`exit_code` is what `jackline run` returns, `child_exit_code` the command's own. `evidence` and `findings` are
    `diagnosis.evidence` as JSON. An attempt without a supervisor has `is_bare` and none of the fields before it.
    `upload_left`: the command has finished, and this is missing in its mirror."""

    format: int | None = None
    attempt: int | None = None
    exit_code: int | None = None
    child_exit_code: int | None = None
    signal: int | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    duration_s: float | None = None
    is_stopped: bool = False
    cause: str | None = None
    text: str | None = None
    resumed_from: str | None = None
    made_progress: bool | None = None
    checkpoint_after: str | None = None
    written_at_s: float | None = None
    evidence: dict[str, Any] | None = None
    findings: tuple[dict[str, Any], ...] = ()
    is_bare: bool | None = left_out()
    upload_left: str | None = left_out()

    @property
    def is_there(self) -> bool:
        """False when the end was not recorded, or nothing of the record can be read."""
        return self != ExitRecord()

    @property
    def was_stopped(self) -> bool:
        return self.is_stopped or self.exit_code == EXIT_STOPPED

    @property
    def word(self) -> str:
        """How it ended, as a verb with its subject before it: 'crashed', 'was killed', 'exited with code 3'."""
        if self.cause in _ENDED_BY_US:
            return "was ended"
        if self.cause in _KILLED or (self.signal is not None and self.cause not in _CRASHED):
            return "was killed"
        if self.cause == "exit_code" and self.child_exit_code is not None:
            return f"exited with code {self.child_exit_code}"
        return "crashed" if self.cause not in (None, "unknown") else "failed"

    @staticmethod
    def from_json(raw: object) -> ExitRecord:
        return decode(ExitRecord, raw)

    def to_json(self) -> dict[str, Any]:
        found = encode(self)
        if self.is_bare:
            for name in ("resumed_from", "made_progress", "checkpoint_after", "written_at_s", "evidence"):
                found.pop(name)
        return found


def read_exit(attempt: AttemptDir) -> ExitRecord:
    return ExitRecord.from_json(atomic.read_json(attempt.exit_file))


def write_exit(attempt: AttemptDir, record: ExitRecord) -> None:
    """Write and sync, because the record must survive a power cut. findings.json holds only the findings."""
    contents = {**record.to_json(), "format": FORMAT, "attempt": attempt.number}
    try:
        atomic.write_json(attempt.exit_file, contents, durable=True)
    except OSError:
        # The reserved space is limited. The last lines of output are the largest part, and are in the log as well.
        atomic.write_json(attempt.exit_file, _without_output(contents), durable=True)
    if not record.is_bare:
        with contextlib.suppress(OSError):  # a copy of what exit.json holds
            atomic.write_json(attempt.findings_file, contents["findings"])


def _without_output(contents: dict[str, Any]) -> dict[str, Any]:
    evidence = contents.get("evidence")
    return {**contents, "evidence": {**evidence, "output_tail": []}} if isinstance(evidence, dict) else contents

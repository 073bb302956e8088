"""start.json and wait.json: which process an attempt's command is, and the exit status that the kernel reported.

The keeper, which does not import Jackline, writes both. In an attempt without a supervisor the session writes
start.json.
"""

from __future__ import annotations

from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import AttemptDir
from jackline.rundir.process_id import ProcessId
from jackline.rundir.records.fields import decode, encode, left_out


@immutable
class StartRecord:
    """`exec_errno` is set when the kernel refused to run the command. `is_adopted`: Jackline did not start it, so
    nobody signals it and nobody learns its exit code."""

    child: ProcessId | None = None
    keeper: ProcessId | None = None
    started_at_s: float | None = None
    exec_errno: int | None = left_out()
    is_bare: bool | None = left_out()
    is_adopted: bool | None = left_out()

    @property
    def is_there(self) -> bool:
        return self != StartRecord()

    @staticmethod
    def from_json(raw: object) -> StartRecord:
        return decode(StartRecord, raw)

    def to_json(self) -> dict[str, Any]:
        return encode(self)


@immutable
class WaitRecord:
    """Either `exit_code` or `signal` is known. `orphans`: processes that outlived the command."""

    status: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    ended_at_s: float | None = None
    max_rss_bytes: int | None = None
    cpu_s: float | None = None
    orphans: tuple[dict[str, Any], ...] = ()
    is_settled: bool = False

    @property
    def is_there(self) -> bool:
        return self != WaitRecord()

    @staticmethod
    def from_json(raw: object) -> WaitRecord:
        return decode(WaitRecord, raw)

    def to_json(self) -> dict[str, Any]:
        return encode(self)


def read_start(attempt: AttemptDir) -> StartRecord:
    return StartRecord.from_json(atomic.read_json(attempt.start_file))


def write_start(attempt: AttemptDir, record: StartRecord) -> None:
    """Write start.json of an attempt without a supervisor."""
    atomic.write_json(attempt.start_file, record.to_json())


def read_wait(attempt: AttemptDir) -> WaitRecord:
    return WaitRecord.from_json(atomic.read_json(attempt.wait_file))

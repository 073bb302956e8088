"""attempts/NNN/rescue-PID.json: the newest rescue of one process, or why there is none.

Written by the process itself (`checkpoint/rescue`), read by the supervisor and by `jackline rescue`. The text for
people is made here, so that the log, the event and the command say the same.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable
from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import AttemptDir
from jackline.rundir.records.fields import decode, encode
from jackline.units import format_bytes

MAX_NAMED = 6
CAUSES = {
    "asked": "because it was asked for",
    "every": "as --rescue-every says",
    "exception": "at an uncaught exception",
    "interrupt": "at Ctrl-C",
    "sigterm": "at SIGTERM",
    "stop": "before it is stopped",
    "time-limit": "at the time limit",
    "stuck": "because it is stuck",
    "memory": "because host memory is nearly full",
    "oom": "after it ran out of GPU memory",
    "exit": "at sys.exit",
}


@immutable
class RescueRecord:
    """`outcome` is saved, writing, refused or failed; `moment` says between which lines of the training it was taken.
    `parts` and `values` are what was found; `missing` is what cannot be had."""

    id: str = ""
    pid: int | None = None
    cause: str = ""
    outcome: str = ""
    why: str = ""
    name: str = ""
    path: str = ""
    step: int | None = None
    is_boundary: bool = False
    moment: str = ""
    at_s: float | None = None
    size_bytes: int | None = None
    stall_s: float | None = None
    write_s: float | None = None
    file: str = ""
    function: str = ""
    line: int | None = None
    parts: tuple[dict[str, Any], ...] = ()
    missing: tuple[str, ...] = ()
    values: dict[str, Any] | None = None
    places: tuple[dict[str, Any], ...] = ()  # frames that know some of the parts, the innermost first

    @property
    def is_there(self) -> bool:
        return bool(self.outcome)

    @property
    def is_saved(self) -> bool:
        return self.outcome == "saved"

    @staticmethod
    def from_json(raw: object) -> RescueRecord:
        return decode(RescueRecord, raw)

    def to_json(self) -> dict[str, Any]:
        return encode(self)


def read_rescue(attempt: AttemptDir, pid: int) -> RescueRecord:
    return RescueRecord.from_json(atomic.read_json(attempt.rescue_file(pid)))


def read_rescues(attempt: AttemptDir) -> list[RescueRecord]:
    """Those of all processes of an attempt, the newest first. Where the newest of a process was not saved, also the
    last that was."""
    found = [RescueRecord.from_json(atomic.read_json(path)) for path in itertools.islice(attempt.list_rescues(), 64)]
    kept = [attempt.kept_rescue_file(one.pid) for one in found if one.pid is not None and not one.is_saved]
    found += [RescueRecord.from_json(atomic.read_json(path)) for path in kept]
    return sorted((one for one in found if one.is_there), key=lambda one: -(one.at_s or 0.0))


def newest_rescue(attempts: Iterable[AttemptDir]) -> RescueRecord | None:
    """The newest one on the disk, of the first of these attempts that has one."""
    found = (one for attempt in attempts for one in read_rescues(attempt) if one.outcome in ("saved", "writing"))
    return next(found, None)


def loading_command(name: str) -> str:
    """What prints the lines that load the last rescue of a run."""
    return f"jackline rescue {shlex.quote(name)} --load"


def write_rescue(attempt: AttemptDir, record: RescueRecord) -> None:
    """One that failed or was refused does not take the place of one that is on the disk."""
    assert record.pid is not None
    if not record.is_saved and (last := read_rescue(attempt, record.pid)).is_saved:
        atomic.write_json(attempt.kept_rescue_file(record.pid), last.to_json(), durable=True)
    atomic.write_json(attempt.rescue_file(record.pid), record.to_json(), durable=record.is_saved)


def rescue_text(record: RescueRecord) -> str:
    """One line: what was rescued and where it is; or why it was not."""
    why = CAUSES.get(record.cause, "")
    if record.outcome in ("saved", "writing"):
        size = f" ({format_bytes(record.size_bytes)})" if record.size_bytes is not None else ""
        verb = "rescued" if record.is_saved else "still writing the rescue of"
        step = f" of step {record.step}" if record.step is not None else ""
        return f"{verb} the state{step} {why}: {record.path}{size}"
    return f"no rescue {why}: {record.why}"


def rescue_lines(record: RescueRecord) -> list[str]:
    """The same, then the moment it was taken at, what it has and what it has not."""
    if record.outcome not in ("saved", "writing"):
        return [rescue_text(record)]
    stall = f"; the training waited {record.stall_s * 1000:.0f} ms" if record.stall_s and record.is_boundary else ""
    lines = [
        rescue_text(record),
        f"  taken {record.moment}{stall}",
        f"  in it: {', '.join(part_words(record))}, RNG states",
    ]
    return lines + [f"  not in it: {missing}" for missing in record.missing]


def part_words(record: RescueRecord) -> list[str]:
    """What is in it: 'model (Net)', 'optimizer (AdamW)'."""
    words = [f"{part.get('key')} ({part.get('class')})" for part in record.parts]
    return words[:MAX_NAMED] + ([f"{len(words) - MAX_NAMED} more"] if len(words) > MAX_NAMED else [])

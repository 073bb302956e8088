"""The state of a run's log from its size and age: growing, silent, empty, only warnings.

A 0-byte log is the most common worry ("is it hung?"), so it is explained, not only shown.
"""

from __future__ import annotations

import re
from typing import Literal

from jackline.diagnosis.deaths.collect import tail_lines
from jackline.immutable import immutable
from jackline.rundir.layout import RunDir
from jackline.rundir.records.start import read_start
from jackline.rundir.status import RunStatus
from jackline.units import format_duration

LogKind = Literal["absent", "empty", "warnings only", "growing", "silent", "ended", "unknown"]

GROWING_WITHIN_S = 60.0
_NUM_LINES = 200
_WHOLE_BYTES = 64 << 10  # a longer log certainly holds more than warnings
_WARNING = (  # compiled where it is used: `status` imports this module
    r"\w*Warning\b|\bWARN(?:ING)?\b|^\s*warn(?:ing)?\b|[Dd]eprecated|^W\d{4} |TF_ENABLE_|oneDNN|Unable to register"
    r"|To suppress this|^\*+$"
)


@immutable
class LogFacts:
    """What was found; `own_lines` are the last lines of the command, without Jackline's notes."""

    path: str
    size_bytes: int | None
    last_output_at_s: float | None
    own_lines: tuple[str, ...] = ()
    is_adopted: bool = False  # started without Jackline: only what goes to a file can be read


@immutable
class LogVerdict:
    kind: LogKind
    text: str


def read_log_facts(run: RunDir, status: RunStatus) -> LogFacts:
    try:
        found = run.out_log.stat()
    except OSError:
        return LogFacts(str(run.out_log), None, None)
    seen_s, silent_s = status.last_seen_at_s, status.supervisor_state.silent_s
    last_s = found.st_mtime
    if seen_s is not None and silent_s is not None:
        last_s = seen_s - silent_s  # not the file's mtime, because our own notes change it
    lines = tail_lines(run.out_log, _NUM_LINES) if found.st_size else ()
    is_adopted = bool(status.attempt and read_start(run.attempt(status.attempt)).is_adopted)
    return LogFacts(str(run.out_log), found.st_size, last_s, lines, is_adopted)


def judge_log(facts: LogFacts, *, is_live: bool | None, running_s: float | None, now_s: float) -> LogVerdict:
    """Pure. `is_live` and `running_s` (how long the attempt has run) are None when unknown."""
    after = f" after {format_duration(running_s)}" if running_s is not None else ""
    if facts.size_bytes is None:
        return LogVerdict("absent", "there is no log yet" if is_live else "there is no log")
    lines = [line for line in facts.own_lines if line.strip()]
    if not lines and facts.is_adopted:
        return LogVerdict("empty", "empty: what goes to a terminal or a pipe cannot be read")
    if not lines:
        why = "; programs that are not Python may keep their output back off a terminal (--tty)" if is_live else ""
        return LogVerdict("empty", f"empty{after if is_live else ''}{why}")
    if facts.size_bytes < _WHOLE_BYTES and are_only_warnings(lines):
        count = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
        return LogVerdict("warnings only", f"nothing but warnings{' so far' if is_live else ''} ({count})")
    if is_live is False:
        return LogVerdict("ended", "complete")
    age_s = max(0.0, now_s - (facts.last_output_at_s or now_s))
    if is_live is None:
        return LogVerdict("unknown", f"last line {format_duration(age_s)} ago")
    if age_s < GROWING_WITHIN_S:
        return LogVerdict("growing", f"growing, last line {format_duration(age_s)} ago")
    return LogVerdict("silent", f"silent for {format_duration(age_s)}")


def are_only_warnings(lines: list[str]) -> bool:
    """Indented lines belong to the warning above them (Python prints the source line there)."""
    is_warning = False
    for line in lines:
        if re.search(_WARNING, line):
            is_warning = True
        elif not (is_warning and line[:1].isspace()):
            return False
    return bool(lines)

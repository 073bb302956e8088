"""Findings as text, for the screen and for lists."""

from __future__ import annotations

from collections.abc import Sequence

from jackline.diagnosis.deaths.evidence import Evidence, Finding
from jackline.diagnosis.deaths.ranks import own_traceback
from jackline.units import format_duration

_MAX_LINES = 8
_NO_ERRORS = ("finished", "stopped", "time_limit")
_INDENT = " " * len("error: ")


def summary_line(findings: Sequence[Finding]) -> str:
    """The best finding in one line, with its confidence."""
    best = findings[0]
    is_said = best.cause == "exit_code"  # its title says itself that the cause is not known
    return best.title if best.confidence == "certain" or is_said else f"{best.title} ({best.confidence})"


def death_text(findings: Sequence[Finding], evidence: Evidence) -> str:
    """What happened, the evidence, one next action; at most eight lines. Of a distributed job also the traceback of
    the rank that failed first, unless that rank is the one on the screen."""
    best = findings[0]
    prefix = "" if best.cause in _NO_ERRORS else "error: "
    others = [_other_line(other) for other in findings[1:3]]
    hint = [f"hint: {best.hint}"] if best.hint else []
    room = _MAX_LINES - 1 - len(others) - len(hint)
    detail = list(best.detail[:room])
    if not detail and not others:
        detail = [f"it ran for {format_duration(evidence.duration_s)}"]
    body = [f"{_INDENT}{line}" for line in [*detail, *others]]
    said = [f"  {line}" for line in own_traceback(evidence)] if prefix else []
    return "\n".join([f"{prefix}{summary_line(findings)}", *body, *said, *hint])


def _other_line(other: Finding) -> str:
    word = "or" if other.confidence == "not sure" else "also"
    return f"{word}: {summary_line((other,))}"

"""Findings as a person sees them on screen and in lists."""

from __future__ import annotations

from collections.abc import Sequence

from jackline.diagnosis.evidence import Evidence, Finding

_MAX_LINES = 8
_PREFIX: dict[str, str] = {"finished": "done", "stopped": "stopped", "time_limit": "stopped"}


def summary_line(findings: Sequence[Finding]) -> str:
    """The best finding in one line, with its uncertainty."""
    best = findings[0]
    doubt = " (not sure)" if best.confidence == "not sure" else ""
    return best.title + doubt


def death_text(findings: Sequence[Finding], evidence: Evidence) -> str:
    """What happened, the evidence, one next action; at most eight lines."""
    best = findings[0]
    prefix = _PREFIX.get(best.cause, "error")
    indent = " " * (len(prefix) + 2)
    lines = [*best.detail]
    others = [f"or: {summary_line((other,))}" for other in findings[1:] if other.confidence == "not sure"]
    room = _MAX_LINES - 1 - len(others) - bool(best.hint)
    body = [f"{indent}{line}" for line in [*lines[:room], *others]]
    hint = [f"hint: {best.hint}"] if best.hint else []
    return "\n".join([f"{prefix}: {summary_line(findings)}", *body, *hint])

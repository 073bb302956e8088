"""Findings as text, for the screen and for lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jackline.diagnosis.deaths.evidence import Evidence, Finding
from jackline.diagnosis.deaths.left.particulars import child_text, end_text, left_place
from jackline.diagnosis.deaths.ranks import own_traceback
from jackline.diagnosis.deaths.sentences import at_place, memory_line, short_place
from jackline.diagnosis.deaths.signal import fault_place, signal_name
from jackline.diagnosis.deaths.traceback_text import fatal_chain
from jackline.units import format_bytes, format_duration

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


# What would speak against a finding that is not certain, by its cause.
_WOULD_CHANGE = {
    "kernel_oom": "counters of the kernel that can be read and show no such kill",
    "killed_by_someone": "an out-of-memory kill in the kernel's counters or its log",
    "preempted": "a word of the scheduler, or of whoever sent the signal",
    "worker_killed": "the signal that ended the worker, or its last words",
    "network": "an answer of the server that refuses the request itself",
    "exit_code": "an error in its output or in a log file of its own",
    "unknown": "anybody who saw its exit status",
}


def evidence_of_death(findings: Sequence[Finding], evidence: Evidence) -> Iterator[str]:
    """For `why --evidence`: the rule that explained the end, how certain it is, and all that it could rest on."""
    best = findings[0]
    yield f"rule: {best.rule or best.cause}" + (f" (cause: {best.cause})" if best.rule else "")
    yield f"certainty: {best.confidence}"
    yield f"it ended with: {_how(evidence)}"
    chain = fatal_chain(evidence.output_tail)
    lines = f"its last {len(evidence.output_tail)} lines of output"
    told = f"{chain.root.kind or 'an error'}{at_place(chain.root.place)}" if chain is not None else ""
    yield f"{lines}: a traceback of {told}" if told else f"{lines}: no traceback"
    if evidence.fault_text:
        yield f"stack of its crash: {short_place(fault_place(evidence.fault_text)) or 'no Python line'}"
    yield from _noted(evidence)
    sent = [f"{signal_name(one.signal)} ({one.why})" for one in evidence.sent_signals]
    yield f"signals that Jackline sent: {', '.join(sent) or 'none'}"
    kills = (evidence.oom_kills_in_cgroup, evidence.oom_kills_on_machine)
    inside, outside = ("not readable" if kill is None else str(kill) for kill in kills)
    yield f"out-of-memory kills that the kernel counted: {inside} in its cgroup, {outside} on the machine"
    yield from memory_line(evidence)
    yield from (f"free on the disk of {disk.path}: {format_bytes(disk.free_bytes)}" for disk in evidence.disks[:3])
    if evidence.log_path:
        yield f"log file: {evidence.log_path}"
    yield from (f"also possible: {summary_line((other,))}" for other in findings[1:])
    if best.confidence != "certain":
        yield f"what would change its mind: {_WOULD_CHANGE.get(best.cause, 'another error in its output or log')}"


def _how(evidence: Evidence) -> str:
    if evidence.signal is not None:
        return signal_name(evidence.signal)
    return f"exit code {evidence.exit_code}" if evidence.exit_code is not None else "nobody saw its exit status"


def _noted(evidence: Evidence) -> Iterator[str]:
    words = evidence.last_words
    if words is not None:
        place = left_place(words)
        how = f"{words.how}{at_place(place)}" if words.how != "exception" else words.error or "an exception"
        who = "read in its script" if words.is_read else "noted by the process as it ended"
        yield f"{who}: {how}"
        yield from (f"noted: {child_text(end)} {end_text(end)}" for end in words.pipes if end.pid)
        yield from (f"noted: file {file.path}{' (proved)' if file.is_proved else ''}" for file in words.files)
    if evidence.rights is not None:
        yield f"measured: {evidence.rights.at} has mode {evidence.rights.mode:04o}, owner {evidence.rights.owner}"

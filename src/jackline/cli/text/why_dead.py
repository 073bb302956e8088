"""Why a run ended, only from its files: works on a copied run, on another machine, without torch.

Owns reading exit.json (or the other files, if that was never written) and the text around the findings.
`jackline.diagnosis` draws the conclusions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jackline.cli.text.clock import clock
from jackline.cli.text.memory import oom_lines
from jackline.diagnosis.deaths.collect import dumped_pids, last_output, read_fault_text, tail_lines
from jackline.diagnosis.deaths.diagnose import diagnose
from jackline.diagnosis.deaths.evidence import Evidence, Finding
from jackline.diagnosis.deaths.left.last_words import read_last_words
from jackline.diagnosis.deaths.report import death_text, evidence_of_death
from jackline.diagnosis.logs.clues import explain_log
from jackline.immutable import immutable
from jackline.rundir.access.reading import read_text
from jackline.rundir.access.trust import judge
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.process_id import boot_id, host_name
from jackline.rundir.records.session import read_session
from jackline.rundir.records.start import WaitRecord, read_start, read_wait
from jackline.rundir.status import RunStatus
from jackline.units import format_bytes, format_duration, format_limit

_TAIL_LINES = 200
_SHOWN_TAIL_LINES = 8


@immutable
class Death:
    """What is known about the end of the last attempt. `origin` says from which file."""

    evidence: Evidence | None
    findings: tuple[Finding, ...]
    origin: str
    notes: tuple[str, ...] = ()


def read_death(run: RunDir, status: RunStatus) -> Death:
    attempt = run.attempt(status.attempt) if status.attempt else None
    if attempt is None:
        return Death(None, (), "nothing", ("it was never started: there is no attempt",))
    if status.exit.evidence is not None:
        evidence = _with_output(run, attempt, Evidence.from_json(status.exit.evidence))
        if not evidence.is_whole:
            return Death(None, (), "exit.json", (f"{attempt.exit_file} is damaged", status.exit.text or ""))
        return Death(evidence, diagnose(evidence), "exit.json")
    notes = tuple(last_seen_lines(run, attempt, status))
    wait = read_wait(attempt)
    if wait.is_there:
        evidence = _evidence_from_wait(run, attempt, wait)
        return Death(evidence, diagnose(evidence), "wait.json", notes)
    return Death(None, (), "supervisor.json", notes)


def _with_output(run: RunDir, attempt: AttemptDir, evidence: Evidence) -> Evidence:
    """On a full disk exit.json leaves out the last lines of output; they are still in its files."""
    if evidence.output_tail:
        return evidence
    last = run.last_attempt()
    log = run.out_log if last is not None and last.number == attempt.number else attempt.raw_out
    return replace(evidence, output_tail=last_output(log, (attempt.raw_out, attempt.raw_err), _TAIL_LINES))


def _evidence_from_wait(run: RunDir, attempt: AttemptDir, wait: WaitRecord) -> Evidence:
    """Evidence from the keeper, for a command that ended after its supervisor had exited."""
    start = read_start(attempt)
    started_at_s = start.started_at_s or 0.0
    pid = start.child.pid if start.child is not None else 0
    is_ours = judge(run).is_ours  # somebody else's run names files of this disk
    ended_at_s = wait.ended_at_s or started_at_s
    return Evidence(
        exit_code=wait.exit_code,
        signal=wait.signal,
        duration_s=max(0.0, ended_at_s - started_at_s),
        ended_at_s=ended_at_s,
        output_tail=tail_lines(attempt.raw_out, _TAIL_LINES) or tail_lines(run.out_log, _TAIL_LINES),
        fault_text=read_fault_text(attempt.stacks, dumped_pids(attempt.stacks), with_source=is_ours),
        last_words=read_last_words(attempt.stacks, pid, wait.exit_code) if is_ours and wait.exit_code else None,
        peak_memory_bytes=wait.max_rss_bytes or 0,
    )


def last_seen_lines(run: RunDir, attempt: AttemptDir, status: RunStatus) -> Iterator[str]:
    """What the last heartbeat reported, for an end that no supervisor saw."""
    seen = status.last_seen_at_s
    since = f"no heartbeat since {clock(seen)}" if seen else "no heartbeat was ever written"
    process = status.child or status.supervisor
    if process is None:
        yield f"{since}; no process of it is known"
    elif status.is_heard_afar:
        yield f"it runs on '{process.host}'; what follows was true at {clock(seen or 0.0)}"
    elif status.state == "elsewhere" or process.host != host_name():
        yield f"{since}; it ran on '{process.host}': whether it lives cannot be told from here"
    elif process.boot_id != boot_id():
        yield f"{since}; the machine has been restarted since, so pid {process.pid} is gone"
    else:
        yield f"{since}, pid {process.pid} is gone"
    state = status.supervisor_state
    verdict, now, memory = state.verdict, state.now, state.memory
    if verdict.text:
        yield f"last verdict: {verdict.kind}: {verdict.text}"
    if now.what:
        place = f" at {now.file}:{now.line}" if now.file else ""
        source = f" `{now.source}`" if now.source else ""
        yield f"last seen doing: {now.what}{place}{source}"
    if memory.used_bytes:
        limit = f" of {format_bytes(memory.limit_bytes)}" if memory.limit_bytes else ""
        yield f"last memory: {format_bytes(memory.used_bytes)}{limit}"
    if status.state != "elsewhere" and not attempt.exit_file.exists() and not attempt.wait_file.exists():
        yield "nobody wrote down how it ended: the machine was lost, or everything was killed at once"


def death_lines(run: RunDir, status: RunStatus, death: Death) -> Iterator[str]:
    attempt = run.attempt(status.attempt) if status.attempt else None
    yield title_line(run, status, death)
    yield from death.notes
    if death.evidence is not None and death.findings:
        text = death_text(death.findings, death.evidence)
        # The title already says that it finished, and after how long.
        is_said = text.startswith(f"finished after {format_duration(death.evidence.duration_s)}\n")
        yield from (line.strip() for line in text.split("\n")[1:]) if is_said else (text,)
        if death.findings[0].cause not in ("finished", "stopped", "time_limit"):
            yield f"certainty: {death.findings[0].confidence}"
        if "peak memory" not in text and "peaked" not in text:  # the latter: as older runs wrote it
            yield from _memory_lines(death.evidence)
    if attempt is None:
        yield f"hint: jackline resume {run.name}"
        return
    session = read_session(run)
    if session.attempt == attempt.number:
        yield from oom_lines(session)
    clue = explain_log(run.out_log)
    if clue and status.state != "finished" and not read_start(attempt).is_adopted:
        yield f"note: {clue}"
    if death.evidence is None:
        tail = tail_lines(run.out_log, _SHOWN_TAIL_LINES) or tail_lines(attempt.raw_out, _SHOWN_TAIL_LINES)
        yield from ("last lines of its output:", *(f"  {line}" for line in tail)) if tail else ()
        if status.state != "elsewhere":
            yield f"hint: jackline resume {run.name} continues it"
    for path in attempt.list_incidents():
        yield f"incident: {path}{_first_words(path)}"
    yield f"log: {run.out_log}"


def evidence_of_end(run: RunDir, status: RunStatus) -> tuple[list[str], bool]:
    """For `why --evidence`: the lines, and whether they explain the end without the last verdict of its life."""
    death = read_death(run, status)
    if death.evidence is None or not death.findings:
        return [], False
    lines = (f"  {line}" for line in evidence_of_death(death.findings, death.evidence))
    return ["", "What this explanation rests on", *lines], death.findings[0].cause != "stuck"


def title_line(run: RunDir, status: RunStatus, death: Death) -> str:
    state = {
        "dead": status.exit.word if status.exit.is_there else "is gone",
        "finished": "finished",
        "stopped": "was stopped",
        "elsewhere": "is unknown from here",
        "empty": "never started",
    }.get(status.state, status.state)
    state = "is alive elsewhere" if status.is_heard_afar else state
    when = ""
    if death.evidence is not None:
        ended_at_s = death.evidence.ended_at_s
        when = f" at {clock(ended_at_s)} after {format_duration(death.evidence.duration_s)}"
    last = run.last_attempt()
    if status.attempt and last is not None and last.number != status.attempt:
        return f"attempt {status.attempt} of run '{run.name}' {state}{when} ({run.path}; {last.number} is its newest)"
    return f"run '{run.name}' {state}{when} (attempt {status.attempt}, {run.path})"


def _memory_lines(evidence: Evidence) -> Iterator[str]:
    if evidence.peak_memory_bytes:
        limit = evidence.memory_limit_bytes
        of = f" of {format_limit(limit, evidence.memory_limit_source)}" if limit else ""
        yield f"peak memory {format_bytes(evidence.peak_memory_bytes)}{of}"


def _first_words(path: Path) -> str:
    try:
        return f" ({read_text(path, 200).partition(chr(10))[0].strip()})"
    except OSError:
        return ""


def death_json(run: RunDir, status: RunStatus, death: Death) -> dict[str, Any]:
    attempt = run.attempt(status.attempt) if status.attempt else None
    return {
        "run": run.name,
        "path": str(run.path),
        "state": status.state,
        "attempt": status.attempt,
        "exit_code": status.exit_code,
        "last_seen_at_s": status.last_seen_at_s,
        "is_stale": status.is_stale,
        "origin": death.origin,
        "notes": list(death.notes),
        "findings": [finding.to_json() for finding in death.findings],
        "text": death_text(death.findings, death.evidence) if death.evidence and death.findings else "",
        "evidence": death.evidence.to_json() if death.evidence else None,
        "incidents": [str(path) for path in attempt.list_incidents()] if attempt else [],
        "read_at_s": time.time(),
    }

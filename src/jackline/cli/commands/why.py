"""`jackline why`: what a live run is doing, with stacks; why an ended run ended, from evidence, and what to do."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from jackline.cli.mirrored import find_to_read
from jackline.cli.options import DURATION, json_option, run_argument, runs_dir_option
from jackline.cli.text.paint import page, print_out
from jackline.errors import UsageError
from jackline.rundir import atomic
from jackline.rundir.access.reading import read_text
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, is_alive
from jackline.rundir.status import RunStatus, read_status
from jackline.units import format_duration

_LARGEST_INCIDENT = 4 << 20


@click.command(short_help="What it is doing, by file and line; why it ended, from evidence.")
@run_argument
@click.option("--pid", type=click.IntRange(min=1), help="Any process of yours, whoever started it.")
@click.option(
    "--for", "look_s", type=DURATION, default="7s", show_default=True, help="How long to look if it is unwatched."
)
@click.option("--attempt", type=click.IntRange(min=1), help="An earlier attempt of the run; default: the last.")
@click.option("--evidence", "with_evidence", is_flag=True, help="What was measured, and which rule decided.")
@click.option(
    "--save-case", metavar="FILE", type=click.Path(path_type=Path), help="Keep a wrong verdict as a file to replay."
)
@click.option("--all", "show_all", is_flag=True, help="Every frame of every thread, and every process.")
@json_option
@runs_dir_option
def command(run: str | None, pid: int | None, runs_dir: str | None, **given: Any) -> None:
    """Explain a run: what it is doing now, or why it ended.

    Without RUN: the only live run, else the newest. A live run's stacks are taken now, without stopping it. A dead or
    copied run is explained from its files alone.
    """
    look_s, as_json = given["look_s"], given["as_json"]
    wanted = {name: given[name] for name in ("show_all", "as_json", "with_evidence", "save_case")}
    if pid is not None:
        if run is not None:
            raise UsageError("a run and --pid were given; only one of them can be meant", hint=f"jackline why {run}")
        _show_process(pid, look_s, **wanted)
        return
    found = find_to_read(run, runs_dir)
    status = read_status(found, attempt=check_attempt(found, given["attempt"]))
    if is_alive(status.child) and status.child is not None:
        _show_live(found, status, status.child, look_s, **wanted)
    else:
        _show_ended(found, status, as_json=as_json)
        _show_last_verdict(
            found, status, with_evidence=given["with_evidence"] and not as_json, path=given["save_case"]
        )


def check_attempt(run: RunDir, number: int | None) -> int | None:
    known = [attempt.number for attempt in run.list_attempts()]
    if number is None or number in known:
        return number
    there = f"it has {known[0]} to {known[-1]}" if len(known) > 1 else f"it has {len(known)}"
    raise UsageError(f"run '{run.name}' has no attempt {number}: {there}", hint=f"jackline why {run.name}")


def _show_process(pid: int, look_s: float, **wanted: Any) -> None:
    from jackline.cli.text.why_live import (
        check_pid,
        evidence_section,
        look_at,
        look_json,
        look_lines,
        verdict_words,
    )

    check_pid(pid)
    _say(f"looking at process {pid} for {format_duration(look_s)} ...")
    look = look_at(pid, stacks_folder=_stacks_folder(pid), look_s=look_s)
    if wanted["save_case"]:
        _save_case(wanted["save_case"], look.case)
    if wanted["as_json"]:
        _print_json(look_json(look))
        return
    lines = [f"process {pid} has run for {format_duration(look.elapsed_s)}"]
    if look.verdict is not None:
        lines.append(verdict_words(look.verdict, look.looked_s))
    evidence = evidence_section(look.evidence) if wanted["with_evidence"] else []
    _print([*lines, *_run_of(pid), *look_lines(look, show_all=wanted["show_all"]), *evidence])


def _show_live(run: RunDir, status: RunStatus, child: ProcessId, look_s: float, **wanted: Any) -> None:
    from jackline.cli.text.memory import memory_section
    from jackline.cli.text.why_live import evidence_section, look_at, look_json, look_lines, verdict_words
    from jackline.diagnosis.logs.clues import explain_log
    from jackline.rundir.records.session import read_session

    attempt = run.last_attempt()
    is_watched = status.state == "alive" and not status.is_stale
    if not is_watched:
        _say(f"nobody watches it: looking at it for {format_duration(look_s)} ...")
    look = look_at(child.pid, stacks_folder=attempt.stacks if attempt else None, look_s=0.0 if is_watched else look_s)
    evidence = (status.supervisor_state.evidence if is_watched else look.evidence) or {}
    if wanted["save_case"]:
        kept = atomic.read_json(attempt.case_file) if attempt and is_watched else look.case
        _save_case(wanted["save_case"], kept)
    if wanted["as_json"]:
        _print_json(_live_json(run, status, {**look_json(look), "evidence": evidence}))
        return
    lines = [
        f"run '{run.name}' is alive: attempt {status.attempt}, pid {child.pid}, for {format_duration(look.elapsed_s)}"
    ]
    lines += list(_watch_lines(run, status, is_watched=is_watched))
    if look.verdict is not None:
        lines.append(verdict_words(look.verdict, look.looked_s))
    lines += memory_section(read_session(run), status.supervisor_state, status.attempt)
    lines += look_lines(look, show_all=wanted["show_all"])
    lines += _job_section(run, status)
    lines += evidence_section(evidence) if wanted["with_evidence"] else []
    clue = explain_log(run.out_log)
    _print([*lines, *([f"note: {clue}"] if clue else []), f"run folder: {run.path}"])


def _job_section(run: RunDir, status: RunStatus) -> list[str]:
    """Of a job of several machines: what the ranks of all of them do."""
    ranks = status.supervisor_state.ranks
    if not ranks and not run.job_file.is_file():
        return []
    from jackline.cli.text.ranks import is_of_several_machines, job_lines

    if not is_of_several_machines(run, ranks):
        return []
    lines = job_lines(str(run.path), ranks, time.time())
    return ["", "The whole job", *(f"  {line}" for line in lines)] if lines else []


def _show_last_verdict(run: RunDir, status: RunStatus, *, with_evidence: bool, path: Path | None) -> None:
    """Of a run that has ended: what its explanation rests on, if it was asked for. The last verdict of its life has
    decided only where Jackline ended it for that, or where nothing else is known."""
    from jackline.cli.text.why_dead import evidence_of_end
    from jackline.cli.text.why_live import evidence_section

    if with_evidence:
        lines, is_explained = evidence_of_end(run, status)
        live = [] if is_explained else evidence_section(status.supervisor_state.evidence or {})
        _print([*lines, *live] or ["there is no evidence of its last verdict"])
    attempt = run.last_attempt()
    if path is not None:
        _save_case(path, atomic.read_json(attempt.case_file) if attempt else None)


def _save_case(path: Path, case: object) -> None:
    if not isinstance(case, dict):
        raise UsageError(
            "there is no case to keep: it has never stood still for 5 s, so there is only PROGRESS",
            hint="jackline why --pid PID --save-case FILE looks at the process itself",
        )
    atomic.write_json(path, case)
    samples = case.get("samples")
    count = len(samples) if isinstance(samples, list) else 0
    _say(f"wrote {path}: {count} samples, to be put into tests/cases or an issue")


def _watch_lines(run: RunDir, status: RunStatus, *, is_watched: bool) -> Iterator[str]:
    from jackline.cli.text.clock import clock
    from jackline.supervisor.hang.incident import steps_in

    state = status.supervisor_state
    if not is_watched:
        seen = f"no heartbeat since {clock(status.last_seen_at_s)}" if status.last_seen_at_s else "no heartbeat yet"
        supervisor = status.supervisor
        if status.state == "unwatched":
            gone = f", its supervisor (pid {supervisor.pid}) is gone" if supervisor else ", it has no supervisor"
            yield f"{seen}{gone}; `jackline watch {run.name}` takes it over"
        else:
            yield f"{seen}, although its supervisor lives: the machine may be overloaded"
        return
    if state.verdict.text:
        yield f"{state.verdict.kind}: {state.verdict.text}"
    if state.silent_s is not None and state.silent_s >= 2:
        yield f"silent for {format_duration(state.silent_s)}"
    for incident in state.incidents:
        yield f"incident: {incident.path}"
    newest = state.incidents[-1].path if state.incidents else None
    if newest and state.verdict.kind in ("STUCK", "SUSPECT"):
        with contextlib.suppress(OSError):
            yield from (f"hint: {step}" for step in steps_in(read_text(newest, _LARGEST_INCIDENT)))


def _show_ended(run: RunDir, status: RunStatus, *, as_json: bool) -> None:
    from jackline.cli.text.why_dead import death_json, death_lines, read_death
    from jackline.rundir.records.rescue import loading_command, read_rescues, rescue_text

    death = read_death(run, status)
    if as_json:
        _print_json(death_json(run, status, death))
        return
    restart = status.supervisor_state.restart_at_s if status.state == "alive" else None
    lines = list(death_lines(run, status, death))
    lines += _job_section(run, status) if status.is_heard_afar else []
    for record in read_rescues(run.attempt(status.attempt))[:1] if status.attempt else []:
        lines += [rescue_text(record), *([f"load it: {loading_command(run.name)}"] if record.is_saved else [])]
    if restart is not None:
        lines.append(f"its supervisor starts it again in {format_duration(max(0.0, restart - time.time()))}")
    _print(lines)


def _live_json(run: RunDir, status: RunStatus, look: dict[str, Any]) -> dict[str, Any]:
    state = status.supervisor_state.to_json()
    return {
        **look,
        "run": run.name,
        "path": str(run.path),
        "state": status.state,
        "attempt": status.attempt,
        "is_stale": status.is_stale,
        "last_seen_at_s": status.last_seen_at_s,
        "silent_s": state["silent_s"],
        "verdict": look["verdict"] or state["verdict"],
        "incidents": state["incidents"],
    }


def _stacks_folder(pid: int) -> Path | None:
    """Where a process started under Jackline dumps its stacks; None for any other process."""
    from jackline.machine.proc import read_environ

    folder = read_environ(pid).get("JACKLINE_STACKS")
    return Path(folder) if folder and os.path.isabs(folder) else None


def _run_of(pid: int) -> Iterator[str]:
    from jackline.machine.proc import read_environ

    folder = read_environ(pid).get("JACKLINE_RUN_DIR")
    if folder:
        yield f"it belongs to run '{Path(folder).name}': `jackline why {folder}` knows more"


def _print(lines: list[str]) -> None:
    print_out(page("\n".join(lines)))


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def _say(text: str) -> None:
    click.echo(f"[jackline] {text}", err=True)

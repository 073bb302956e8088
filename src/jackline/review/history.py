"""The attempts of a run with their beginnings and ends, as far as they were recorded.

Reads only. An end that nobody recorded is the last moment at which the attempt was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from jackline.immutable import immutable
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.records.exit import ExitRecord, read_exit
from jackline.rundir.records.session import read_session
from jackline.rundir.records.start import read_start, read_wait
from jackline.rundir.records.supervisor import read_supervisor
from jackline.rundir.records.timeline import TimelineRecord, read_timeline
from jackline.rundir.status import read_status


@immutable
class AttemptSpan:
    """One start of the command. `is_open`: it has not ended, as far as is known."""

    number: int
    started_at_s: float
    ended_at_s: float
    is_open: bool = False
    is_stopped: bool = False
    cause: str = ""
    exit_code: int | None = None
    summary: str = ""


@immutable
class History:
    """The attempts in order, and the lines of timeline.jsonl."""

    attempts: tuple[AttemptSpan, ...] = ()
    marks: tuple[TimelineRecord, ...] = ()


def read_history(run: RunDir, *, now_s: float) -> History:
    """The last attempt of a run that is alive lasts until `now_s`."""
    is_alive = read_status(run, now_s=now_s).state in ("alive", "unwatched")
    marks = read_timeline(run)
    dirs = run.list_attempts()
    spans = []
    for attempt in dirs:
        is_open = is_alive and attempt is dirs[-1]
        span = _read_attempt(run, attempt, marks, now_s if is_open else None)
        if span is not None:
            spans.append(span)
    return History(tuple(spans), marks)


def steps_per_s(marks: Sequence[TimelineRecord]) -> tuple[tuple[float, float], ...]:
    """The time of a line, and the speed from there to the next one of its attempt."""
    return tuple(
        (one.at_s, (two.step - one.step) / (two.at_s - one.at_s))
        for one, two in pairwise(marks)
        if one.attempt == two.attempt and one.step is not None and two.step is not None and two.step > one.step
        if one.at_s is not None and two.at_s is not None and two.at_s - one.at_s >= 1.0
    )


def usual_steps_per_s(marks: Sequence[TimelineRecord]) -> float | None:
    """The median over the run."""
    rates = sorted(rate for _, rate in steps_per_s(marks))
    return rates[len(rates) // 2] if rates else None


def step_times(marks: Sequence[TimelineRecord]) -> dict[str, list[tuple[float, float]]]:
    """How long a step took, and which part of it an attached loop waited for data or for a save."""
    found: dict[str, list[tuple[float, float]]] = {"whole step": [], "waiting for data": [], "saving": []}
    for one, two in pairwise(marks):
        if one.attempt != two.attempt or one.step is None or two.step is None or two.step <= one.step:
            continue
        at_s, steps = two.at_s or 0.0, two.step - one.step
        found["whole step"].append((at_s, (at_s - (one.at_s or 0.0)) / steps))
        for name, part in (("waiting for data", "fetch"), ("saving", "save")):
            if part in one.spent_s and part in two.spent_s:
                found[name].append((at_s, max(0.0, two.spent_s[part] - one.spent_s[part]) / steps))
    return found


def _read_attempt(
    run: RunDir, attempt: AttemptDir, marks: tuple[TimelineRecord, ...], now_s: float | None
) -> AttemptSpan | None:
    start, record, wait = read_start(attempt), read_exit(attempt), read_wait(attempt)
    own = [line.at_s for line in marks if line.attempt == attempt.number and line.at_s is not None]
    started = next((at for at in (start.started_at_s, record.started_at_s, *own[:1]) if at is not None), None)
    if started is None:
        return None  # created, never begun
    if now_s is not None:
        return AttemptSpan(attempt.number, started, max(started, now_s), is_open=True)
    recorded = record.ended_at_s if record.ended_at_s is not None else wait.ended_at_s
    ended = recorded if recorded is not None else _last_seen(run, attempt.number, own, started)
    return AttemptSpan(
        number=attempt.number,
        started_at_s=started,
        ended_at_s=max(started, ended),
        is_stopped=record.was_stopped,
        cause=record.cause or "",
        exit_code=record.exit_code,
        summary=_first_line(record),
    )


def _last_seen(run: RunDir, number: int, own: list[float], started: float) -> float:
    states = (read_supervisor(run), read_session(run))
    beats = (state.at_s for state in states if state.attempt == number and state.at_s is not None)
    return max([started, *own[-1:], *beats])


def _first_line(record: ExitRecord) -> str:
    line = (record.text or "").partition("\n")[0]
    return line.removeprefix("error: ").removeprefix("done: ")

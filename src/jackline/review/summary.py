"""Everything a report says about a run, as plain data, read from its folder. No wording for pages, no torch."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from jackline.immutable import immutable
from jackline.review.chart import Chart, Line
from jackline.review.goodput import Account, account
from jackline.review.history import History, read_history, steps_per_s
from jackline.review.redact import redact
from jackline.review.rewinds import WentBack, read_rewinds
from jackline.rundir.access.reading import read_text
from jackline.rundir.jsonl import read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.records.event import EventRecord
from jackline.rundir.records.exit import ExitRecord
from jackline.rundir.records.memory import MemoryRecord, read_memory
from jackline.rundir.records.metrics import Series, read_series
from jackline.rundir.records.session import SessionRecord, read_session
from jackline.rundir.run_file import DamagedRun, RunFile, read_run_file
from jackline.rundir.status import RunStatus, read_status
from jackline.units import format_bytes

MAX_EVENTS = 400
MAX_EVENT_BYTES = 8 << 20
MAX_INCIDENTS = 3
MAX_INCIDENT_BYTES = 32 << 10
MAX_CONFIG_BYTES, MAX_CONFIG_LINES, MAX_CONFIG_LINE = 64 << 10, 300, 300
# Events that a person wants to read; the others are for programs.
TOLD = frozenset(
    {"started", "resumes", "resumed", "passed_over", "note", "verdict", "stuck", "incident", "memory", "restart",
     "died", "stopped", "finished", "taken_over", "mirror_failed", "not_mirrored", "checkpoint_failed",
     "checkpoint_skipped", "alarm", "smaller", "changed", "complete", "protection_off", "unverified", "grace",
     "shifted", "unrepeatable", "rescued", "skipped_batches", "rewound", "slow", "replay"}
)  # fmt: skip
FIRST = ("loss", "train_loss", "val_loss", "eval_loss", "lr", "learning_rate", "grad_norm")
MAX_CHARTS = 8


@immutable
class Summary:
    """`told`: events in the order of time. `versions`: packages recorded when it started."""

    run: RunDir
    now_s: float
    status: RunStatus
    contents: RunFile | None
    history: History
    account: Account
    session: SessionRecord
    memory: MemoryRecord
    told: tuple[EventRecord, ...] = ()
    series: tuple[Series, ...] = ()
    problems: tuple[str, ...] = ()
    incidents: tuple[tuple[int, str], ...] = ()  # the attempt, and what was found then, with the stacks
    rewinds: tuple[WentBack, ...] = ()
    config: str = ""  # of a recipe, without secrets
    made_on: str = field(default_factory=platform.node)

    @property
    def ending(self) -> ExitRecord:
        return self.status.exit

    @property
    def has_failed(self) -> bool:
        return self.status.state == "dead"

    @property
    def last_step(self) -> float | None:
        steps = [line.run_step for line in self.history.marks if line.run_step is not None]
        return self.session.step if self.session.step is not None else max(steps, default=None)


def summarise(run: RunDir, *, now_s: float) -> Summary:
    """Never raises for a damaged run: what cannot be read is left out and said in `problems`."""
    problems: list[str] = []
    contents: RunFile | None = None
    try:
        contents = read_run_file(run)
    except (DamagedRun, OSError) as error:
        problems.append(str(error).partition("\n")[0])
    status = read_status(run, now_s=now_s)
    history = read_history(run, now_s=now_s)
    return Summary(
        run=run,
        now_s=now_s,
        status=status,
        contents=contents,
        history=history,
        account=account(history.attempts, history.marks),
        session=read_session(run),
        memory=read_memory(run),
        told=tuple(read_events(run)),
        series=read_series(run),
        problems=tuple(problems),
        incidents=tuple(read_incidents(run)),
        rewinds=read_rewinds(run),
        config=read_config(run),
    )


def read_config(run: RunDir) -> str:
    """The resolved settings of a recipe's run, redacted line by line; '' when there are none."""
    try:
        lines = read_text(run.config_file, MAX_CONFIG_BYTES).splitlines()
    except OSError:
        return ""
    shown = [redact(line[:MAX_CONFIG_LINE]) for line in lines[:MAX_CONFIG_LINES]]
    more = [f"... {len(lines) - len(shown)} more lines"] if len(lines) > len(shown) else []
    return "\n".join([*shown, *more]).strip()


def read_incidents(run: RunDir) -> list[tuple[int, str]]:
    """The last alarms with their stacks. Without the native ones, which the file beside them has."""
    found = []
    for attempt in run.list_attempts():
        for path in attempt.list_incidents():
            try:
                text = read_text(path, MAX_INCIDENT_BYTES)
            except OSError:
                continue
            found.append((attempt.number, text.partition("\nNative stacks\n")[0].strip()))
    return found[-MAX_INCIDENTS:]


def read_events(run: RunDir) -> Sequence[EventRecord]:
    found: list[EventRecord] = []
    for path in (run.supervisor_events, run.session_events(0)):
        lines = read_lines(path, max_bytes=MAX_EVENT_BYTES).records
        found += (event for event in map(EventRecord.from_json, lines) if event.event in TOLD and event.text)
    found = [event for event in found if event.at_s is not None]
    found.sort(key=lambda event: event.at_s or 0.0)
    # The first and the last are worth most: how it began and how it ended.
    half = MAX_EVENTS // 2
    return found if len(found) <= MAX_EVENTS else found[:half] + found[-half:]


def charts_of(summary: Summary) -> list[Chart]:
    """The numbers of the training over steps, then memory and speed over time."""
    breaks = tuple(_restart_steps(summary.history))
    charts = []
    ordered = sorted(summary.series, key=lambda series: (_place(series.name), series.name))
    for series in ordered[: MAX_CHARTS - 2]:
        spots = tuple((point.step, point.value) for point in series.points if point.step is not None)
        is_counted = len(spots) == len(series.points)
        if not is_counted:
            spots = tuple((float(number), point.value) for number, point in enumerate(series.points))
        guessed = ", as far as its output was understood" if series.is_guessed else ""
        x_name = "step" if is_counted else "report"
        charts.append(Chart(series.name + guessed, (Line(series.name, spots),), x_name, breaks=breaks))
    return [*charts, *_machine_charts(summary)]


def _machine_charts(summary: Summary) -> list[Chart]:
    marks = summary.history.marks
    if not marks:
        return []
    begin_s = marks[0].at_s or 0.0
    times = tuple((line.at_s or 0.0) - begin_s for line in marks)
    restarts = tuple(attempt.started_at_s - begin_s for attempt in summary.history.attempts[1:])
    memory = [Line("host RAM", _known(times, [line.used_bytes for line in marks]))]
    if any(line.gpu_bytes for line in marks):
        memory.append(Line("GPU", _known(times, [line.gpu_bytes for line in marks])))
    found = [Chart("memory", tuple(memory), "time", format_bytes, restarts, starts_at_zero=True)]
    speed = tuple((at_s - begin_s, rate) for at_s, rate in steps_per_s(marks))
    if speed:
        found.append(Chart("steps a second", (Line("steps/s", speed),), "time", breaks=restarts, starts_at_zero=True))
    return found


def _known(times: Sequence[float], values: Sequence[float | None]) -> tuple[tuple[float, float], ...]:
    return tuple((at_s, float(value)) for at_s, value in zip(times, values, strict=True) if value is not None)


def _restart_steps(history: History) -> list[float]:
    steps = []
    for attempt in history.attempts[1:]:
        own = (
            line.run_step for line in history.marks if line.attempt == attempt.number and line.run_step is not None
        )
        first = next(own, None)
        if first is not None:
            steps.append(first)
    return steps


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def first_finding(ending: ExitRecord) -> Mapping[str, Any]:
    return ending.findings[0] if ending.findings else {}

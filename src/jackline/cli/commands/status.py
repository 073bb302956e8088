"""`jackline status`: whether a run is alive, its progress, time left, activity, and what a kill would lose."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from typing import Any

import click

from jackline.cli.mirrored import find_to_read
from jackline.cli.options import pid_option
from jackline.cli.text.paint import page, print_out
from jackline.cli.view import run_view
from jackline.cli.view.run_view import RunView, read_view
from jackline.diagnosis.logs.curves import stale_curves
from jackline.errors import UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.records.start import read_start
from jackline.units import parse_price

SCHEMA = "jackline.status/1"
MAX_TIMELINE = 1 << 20


@click.command(short_help="Is it alive, how far, when done, what is at risk.")
@click.argument("run", required=False)
@pid_option
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(run: str | None, pid: int | None, as_json: bool, runs_dir: str | None) -> None:
    """Say how RUN is doing; without RUN the only live one, else the newest.

    Works on a run of another machine, on a copied one and on a damaged one. The exit code is 0 whenever the state
    could be read, whatever it is, and 2 for a run that cannot be found. With --pid a process that was started without
    Jackline becomes a run, which is watched from now on; it is only read, never signalled.
    """
    if pid is not None:
        found = _run_of_process(pid, run, runs_dir)
    else:
        found = find_to_read(run, runs_dir, is_told=not as_json)
    view = with_next_start(found, read_view(found, now_s=run_view.wall_clock_s()))
    if as_json:
        click.echo(json.dumps(view_json(view), indent=1, default=str))
        return
    from jackline.cli.text.headline import state_tone
    from jackline.cli.text.status import status_text

    print_out(page(status_text(with_goodput(found, view)), state_tone(view)))


def _run_of_process(pid: int, run: str | None, runs_dir: str | None) -> RunDir:
    from jackline.cli.adopting import run_of_process

    return run_of_process(pid, run, runs_dir)


def with_next_start(run: RunDir, view: RunView) -> RunView:
    """Add what the run would resume from, if it has ended but not finished."""
    if view.status.state not in ("stopped", "dead") or view.contents is None:
        return view
    from jackline.cli.text.resume import next_start

    try:
        return replace(view, next_start=next_start(run, view.contents, view.now_s))
    except (OSError, TypeError, ValueError):
        return view  # damaged files: everything else is still worth printing


def with_goodput(run: RunDir, view: RunView) -> RunView:
    """Add where the time went, unless that takes long to read: `jackline goodput` reads a long run whole."""
    from jackline.review.goodput import account, goodput_line
    from jackline.review.history import read_history

    try:
        last = run.last_attempt()
        is_adopted = last is not None and read_start(last).is_adopted  # how it began was not seen
        if is_adopted or run.timeline.stat().st_size > MAX_TIMELINE:
            return view
        price = parse_price(os.environ["JACKLINE_PRICE"]) if os.environ.get("JACKLINE_PRICE") else None
        history = read_history(run, now_s=view.now_s)
        return replace(view, goodput=goodput_line(account(history.attempts, history.marks), price))
    except (OSError, TypeError, ValueError, UsageError):
        return view  # damaged files, or a price that is none


def view_json(view: RunView) -> dict[str, Any]:
    """The same as JSON for programs: numbers as they were read, and the state as decided."""
    from jackline.cli.text.headline import headline
    from jackline.cli.text.status import loss_line

    status = view.status
    return {
        "schema": SCHEMA,
        "name": view.name,
        "path": view.path,
        "state": status.state,
        "text": headline(view),
        "attempt": status.attempt,
        "is_stale": status.is_stale,
        "last_seen_at_s": status.last_seen_at_s,
        "started_at_s": view.started_at_s,
        "running_s": view.running_s,
        "exit_code": status.exit_code,
        "cause": status.exit.cause,
        "explanation": status.exit.text,
        "command": view.contents.command if view.contents else None,
        "host": view.contents.host if view.contents else None,
        "git": view.contents.git if view.contents else None,
        "machine": view.contents.machine if view.contents else None,
        "problem": view.problem or None,
        "progress": asdict(view.progress) if view.progress.done is not None else None,
        "loss": loss_line(view) if view.is_live else None,
        "log": {
            "path": view.log.path,
            "size_bytes": view.log.size_bytes,
            "last_output_at_s": view.log.last_output_at_s,
            "verdict": view.log_verdict.kind,
            "text": view.log_verdict.text,
        },
        "mirrors": [record.to_json() for record in view.mirrors if record.is_there],
        "resume": view.next_start.to_json() if view.next_start else None,
        "curves": {**asdict(view.curves), "text": stale_curves(view.curves, view.started_at_s)},
        "session": view.session.to_json() if view.session.is_there else None,
        "supervisor": status.supervisor_state.to_json() if status.supervisor_state.is_there else None,
    }

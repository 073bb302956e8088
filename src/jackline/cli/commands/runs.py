"""`jackline runs`: all runs that can be found from here, and the state of their logs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from jackline.cli.text.safety import safe_text
from jackline.cli.view import run_view
from jackline.cli.view.run_view import RunView, read_view
from jackline.rundir.find import list_runs, runs_folder
from jackline.units import format_bytes, format_duration

SHOWN = 20


@click.command(short_help="All runs that can be found from here.")
@click.option("--logs", "shows_logs", is_flag=True, help="Size, age and verdict of every log.")
@click.option("--json", "as_json", is_flag=True, help="A JSON list, newest first.")
@click.option("--all", "shows_all", is_flag=True, help=f"More than the newest {SHOWN}.")
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(shows_logs: bool, as_json: bool, shows_all: bool, runs_dir: str | None) -> None:
    """List the runs of the runs folder and those registered from other folders, newest first."""
    folder = runs_folder(runs_dir)
    found = list_runs(folder)
    shown = found if shows_all else found[:SHOWN]
    now_s = run_view.wall_clock_s()
    views = [read_view(run, now_s=now_s) for run in shown]
    if as_json:
        from jackline.cli.commands.status import view_json

        click.echo(json.dumps([view_json(view) for view in views], indent=1, default=str))
        return
    if not found:
        print(f"there is no run in {folder}", file=sys.stderr)
        print("hint: start one: jackline run -- python train.py", file=sys.stderr)
        return
    click.echo(logs_table(views) if shows_logs else runs_table(views))
    if len(found) > len(shown):
        print(f"{len(found) - len(shown)} older ones are not shown: jackline runs --all", file=sys.stderr)


def runs_table(views: Sequence[RunView]) -> str:
    rows = [["NAME", "STATE", "ATTEMPT", "PROGRESS", "AGE", "PATH"]]
    for view in views:
        attempt = str(view.status.attempt) if view.status.attempt else "-"
        rows.append(
            [safe_text(view.name, 60), state_word(view), attempt, _progress(view), _age(view), _path(view.path)]
        )
    return align(rows)


def logs_table(views: Sequence[RunView]) -> str:
    rows = [["NAME", "STATE", "SIZE", "LAST OUTPUT", "VERDICT", "LOG"]]
    for view in views:
        log = view.log
        size = "-" if log.size_bytes is None else format_bytes(log.size_bytes)
        age = "-"
        if log.last_output_at_s is not None and log.size_bytes:
            age = f"{format_duration(max(0.0, view.now_s - log.last_output_at_s))} ago"
        rows.append([safe_text(view.name, 60), state_word(view), size, age, view.log_verdict.text, _path(log.path)])
    return align(rows)


def state_word(view: RunView) -> str:
    """The state, with its uncertainty or its reason."""
    state = view.status.state
    if view.problem:
        return f"{state}, damaged"
    if state == "alive" and view.state.is_restarting:
        return "restarting"
    if state == "alive" and view.status.is_stale:
        return "alive, stale"
    if state == "alive" and (trouble := _trouble(view)):
        return f"alive, {trouble}"
    if state == "unwatched" and view.pause is not None:
        return f"unwatched, {_trouble(view)}"
    if state == "dead":
        cause = view.status.exit.cause
        return f"dead ({safe_text(cause, 30).replace('_', ' ')})" if cause else "dead (end not seen)"
    return state


def _trouble(view: RunView) -> str:
    """'STUCK for 12 min', from the supervisor's verdict; '' while the run makes progress."""
    verdict = view.state.verdict
    if view.pause is not None:
        at_s = view.pause.since_s
        length = f" for {format_duration(max(0.0, view.now_s - at_s))}" if at_s is not None else ""
        return f"paused{length}"
    if not verdict.is_alarm:
        return ""
    return f"{verdict.kind} for {format_duration(verdict.for_s)}" if verdict.for_s is not None else str(verdict.kind)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart; the last column is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _progress(view: RunView) -> str:
    done, total = view.progress.done, view.progress.total
    if done is None:
        return "-"
    if total and done < total and view.status.state == "finished":
        return f"done; {done:,.0f}/{total:,.0f} printed last"  # it finished, so no share of it is missing
    return f"{done:,.0f}/{total:,.0f} ({100 * done / total:.0f} %)" if total else f"{done:,.0f}"


def _age(view: RunView) -> str:
    if view.contents is None:
        return "-"
    return format_duration(max(0.0, view.now_s - view.contents.created_at_s))


def _path(path: str) -> str:
    """The path, shortened when it is below the current folder."""
    try:
        return safe_text(Path(path).relative_to(Path.cwd()), 400)
    except (ValueError, OSError):
        return safe_text(path, 400)

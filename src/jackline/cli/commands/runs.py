"""`jackline runs`: all runs that can be found from here, the state of their logs, and how to delete them."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from jackline.cli.mirrored import folder_to_read
from jackline.cli.options import SOME_TIME, ListByDefault, json_option, runs_dir_option
from jackline.cli.text.headline import state_tone
from jackline.cli.text.paint import print_out, stdout_columns, stdout_has_color
from jackline.cli.text.safety import safe_text
from jackline.cli.text.table import Cell, Column, draw_table
from jackline.cli.view import run_view
from jackline.cli.view.run_view import RunView, read_view
from jackline.errors import EXIT_FAILED, JacklineError, UsageError
from jackline.rundir.access.patience import ask_each
from jackline.rundir.find import find_run, list_runs, runs_folder
from jackline.rundir.kin import as_tree, fork_of
from jackline.rundir.layout import RunDir
from jackline.units import format_bytes, format_duration

SHOWN = 20
_ENDED = ("finished", "stopped", "dead", "empty")
_RUNS = (
    Column("NAME", floor=16),
    Column("STATE", floor=28),
    Column("ATTEMPT", rank=2, is_right=True),
    Column("PROGRESS", rank=1),
    Column("AGE"),
    Column("PATH", floor=24, rank=3),
)
_LOGS = (
    Column("NAME", floor=12),
    Column("STATE", floor=16),
    Column("SIZE", rank=2),
    Column("LAST OUTPUT", rank=1),
    Column("VERDICT", floor=24),
    Column("LOG", floor=20, rank=3),
)


@click.group(cls=ListByDefault, short_help="All runs that can be found from here; delete some.")
def command() -> None:
    """List runs, newest first, or delete them.

    \b
    jackline runs                       one line a run; --all, --logs, --json
    jackline runs rm NAME ...           delete runs that have ended
    jackline runs prune --older 30d     delete all that ended longer ago
    """


@command.command("list", short_help="State, progress and age of each run.")
@click.option("--logs", "shows_logs", is_flag=True, help="Size, age and verdict of every log.")
@click.option("--all", "shows_all", is_flag=True, help=f"More than the newest {SHOWN}.")
@json_option
@runs_dir_option
def list_command(shows_logs: bool, shows_all: bool, as_json: bool, runs_dir: str | None) -> None:
    """List the runs of the runs folder and those registered from other folders, newest first."""
    folder = folder_to_read(runs_dir)
    hung: list[RunDir] = []
    found = list_runs(folder, hung)
    shown = found if shows_all else found[:SHOWN]
    now_s = run_view.wall_clock_s()
    answers, silent = ask_each([functools.partial(read_view, run, now_s=now_s) for run in shown])
    views = [view for _, view in sorted(answers.items())]
    _say_missing([*hung, *(shown[number] for number in silent)], "does not answer: its disk or mount hangs")
    _say_missing([run for number, run in enumerate(shown) if number not in {*answers, *silent}])
    if as_json:
        from jackline.cli.commands.status import view_json

        click.echo(json.dumps([view_json(view) for view in views], indent=1, default=str))
        return
    if not found:
        print(f"there is no run in {folder}", file=sys.stderr)
        print("hint: start one: jackline run -- python train.py", file=sys.stderr)
        return
    print_out(logs_table(views) if shows_logs else runs_table(views))
    if len(found) > len(shown):
        print(f"{len(found) - len(shown)} older ones are not shown: jackline runs --all", file=sys.stderr)


# -- deleting --------------------------------------------------------------------------------------------------------


@command.command("rm", short_help="Delete runs, with their checkpoints.")
@click.argument("names", nargs=-1, required=True, metavar="RUN...")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also a run that was last seen on another machine.")
@json_option
@runs_dir_option
def rm_command(names: Sequence[str], runs_dir: str | None, **given: Any) -> None:
    """Delete runs that have ended: their logs, metrics and checkpoints. Copies in a mirror stay."""
    folder = runs_folder(runs_dir)
    found = list({run.path: run for run in (find_run(name, folder) for name in names)}.values())
    _delete([_with_view(run) for run in found], given)


@command.command("prune", short_help="Delete all runs that ended longer ago than --older.")
@click.option("--older", "older_s", type=SOME_TIME, required=True, help="Ended at least this long ago: 30d, 12h.")
@click.option("--dead", "only_dead", is_flag=True, help="Only those that crashed or never started.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, delete nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@runs_dir_option
def prune_command(older_s: float, only_dead: bool, runs_dir: str | None, **given: Any) -> None:
    """Delete the runs of the runs folder that ended longer ago than --older. Live runs, and those of other machines
    and other folders, are left alone."""
    folder = runs_folder(runs_dir)
    states = ("dead", "empty") if only_dead else _ENDED
    pairs = [_with_view(run) for run in list_runs(folder) if run.path.parent == folder]
    ended = [(run, view) for run, view in pairs if view.status.state in states]
    old = [(run, view) for run, view in ended if view.now_s - _ended_at_s(run, view) >= older_s]
    if not old and not given["as_json"]:
        word = "crashed run" if only_dead else "ended run"
        click.echo(f"nothing to delete: no {word} in {folder} is older than {format_duration(older_s)}")
        return
    _delete(old, {"force": False, **given})


def _with_view(run: RunDir) -> tuple[RunDir, RunView]:
    return run, read_view(run, now_s=run_view.wall_clock_s())


def _ended_at_s(run: RunDir, view: RunView) -> float:
    """When it ended; for one whose end nobody saw, the last sign of it."""
    if view.status.exit.ended_at_s is not None:
        return view.status.exit.ended_at_s
    signs = [view.status.last_seen_at_s, view.session.at_s, view.contents.created_at_s if view.contents else None]
    seen = [at_s for at_s in signs if at_s is not None]
    return max(seen) if seen else run.path.stat().st_mtime


def _delete(pairs: Sequence[tuple[RunDir, RunView]], given: dict[str, Any]) -> None:
    from jackline.machine.disk import used_bytes

    for run, view in pairs:
        _refuse_in_use(run, view, force=given["force"])
    sizes = {run.path: used_bytes(run.path, _checkpoints_of(run)) for run, _ in pairs}
    lines = [
        f"{safe_text(view.name, 60)}  {state_word(view)}, {format_bytes(sizes[run.path])}" for run, view in pairs
    ]
    is_dry = given.get("dry_run", False)
    if not is_dry and not given["yes"]:
        _ask(lines, sum(sizes.values()))
    deleted, problems = [], []
    for (run, view), line in zip(pairs, lines, strict=True):
        try:
            if not is_dry:
                _delete_one(run)
        except (JacklineError, OSError) as error:
            why = error.message if isinstance(error, JacklineError) else f"cannot delete {run.path}: {error.strerror}"
            problems.append(why)
            continue
        deleted.append({"name": view.name, "path": str(run.path), "freed_bytes": sizes[run.path]})
        if not given["as_json"]:
            click.echo(f"{'would delete' if is_dry else 'deleted'} {line}")
    if given["as_json"]:
        click.echo(json.dumps({"deleted": deleted, "problems": problems, "is_dry_run": is_dry}, indent=1))
    for why in problems:
        print(f"error: {why}", file=sys.stderr)
    if problems:
        sys.exit(EXIT_FAILED)


def _refuse_in_use(run: RunDir, view: RunView, *, force: bool) -> None:
    if view.is_live:
        where = " on another machine" if view.status.is_heard_afar else ""
        there = " there" if where else ""
        raise UsageError(f"run '{run.name}' is alive{where}", hint=f"end it{there} first: jackline stop {run.name}")
    if view.status.state == "elsewhere" and not force:
        raise UsageError(
            f"run '{run.name}' was last seen on another machine; whether it lives cannot be told from here",
            hint=f"once you know that it ended there: jackline runs rm {run.name} --force",
        )


def _ask(lines: Sequence[str], total_bytes: int) -> None:
    """At a terminal a person confirms; elsewhere nobody can, so --yes must have been given."""
    if not sys.stdin.isatty():
        raise UsageError(
            "deleting runs needs --yes where nobody can be asked",
            detail=tuple(lines),
            hint="add --yes to delete them",
        )
    for line in lines:
        click.echo(f"  {line}", err=True)
    what = "this run" if len(lines) == 1 else f"these {len(lines)} runs"
    click.confirm(f"delete {what} with checkpoints, {format_bytes(total_bytes)}?", abort=True, err=True)


def _checkpoints_of(run: RunDir) -> Path:
    from jackline.checkpoint.place import choose_place

    return choose_place(run).folder


def _delete_one(run: RunDir) -> None:
    import shutil

    from jackline.rundir.create import remove_run

    checkpoints = _checkpoints_of(run)  # on another disk for a run on a network mount
    remove_run(run)
    if run.path not in checkpoints.parents:
        shutil.rmtree(checkpoints, ignore_errors=True)


# -- the tables ------------------------------------------------------------------------------------------------------


def _say_missing(runs: Sequence[RunDir], why: str = "cannot be read; `jackline status PATH` tells more") -> None:
    for run in runs:
        print(f"{safe_text(run.path, 400)} {why}", file=sys.stderr)


def runs_table(views: Sequence[RunView]) -> str:
    rows: list[list[Cell | str]] = []
    for depth, view in as_tree([(Path(view.path), fork_of(view.contents), view) for view in views]):
        attempt = str(view.status.attempt) if view.status.attempt else "-"
        state = Cell(state_word(view), state_tone(view))
        name = "  " * (depth - 1) + "└ " * bool(depth) + safe_text(view.name, 90)
        rows.append([name, state, attempt, _progress(view), _age(view), _path(view.path)])
    return draw_table(_RUNS, rows, width=stdout_columns(), use_color=stdout_has_color())


def logs_table(views: Sequence[RunView]) -> str:
    rows: list[list[Cell | str]] = []
    for view in views:
        log = view.log
        size = "-" if log.size_bytes is None else format_bytes(log.size_bytes)
        age = "-"
        if log.last_output_at_s is not None and log.size_bytes:
            age = f"{format_duration(max(0.0, view.now_s - log.last_output_at_s))} ago"
        state = Cell(state_word(view), state_tone(view))
        rows.append([safe_text(view.name, 90), state, size, age, view.log_verdict.text, _path(log.path)])
    return draw_table(_LOGS, rows, width=stdout_columns(), use_color=stdout_has_color())


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
        if not view.status.exit.is_there:
            return "gone (end not seen)"
        word, cause = view.status.exit.word.removeprefix("was "), view.status.exit.cause
        return f"{word} ({safe_text(cause, 30).replace('_', ' ')})" if cause not in (None, "exit_code") else word
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


def _progress(view: RunView) -> str:
    done, total, unit = view.progress.done, view.progress.total, view.progress.unit or ""
    if done is None:
        return "-"
    if not total:
        return f"{view.progress.one_of} {done:,.0f}".strip()
    if unit == "%":
        return "done" if view.status.state == "finished" else f"{100 * done / total:.0f} %"
    if done < total and view.status.state == "finished":
        return f"done; {done:,.0f}/{total:,.0f} printed last"  # it finished, so no share of it is missing
    return f"{done:,.0f}/{total:,.0f} ({100 * done / total:.0f} %)"


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

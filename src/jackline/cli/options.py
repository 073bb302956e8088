"""Options and arguments that several commands share, so that they are the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from jackline.rundir.find import find_run, runs_folder
from jackline.rundir.layout import RunDir

Command = TypeVar("Command", bound=Callable[..., Any])


def run_argument(command: Command) -> Command:
    """RUN: a name or a path; without it the only live run, else the newest."""
    return click.argument("run", required=False)(command)


def runs_dir_option(command: Command) -> Command:
    return click.option(
        "--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs."
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


def detach_options(command: Command) -> Command:
    """--detach, and --json for its answer."""
    command = click.option("--json", "as_json", is_flag=True, help="With --detach: print name and folder as JSON.")(
        command
    )
    return click.option("--detach", is_flag=True, help="Start it and come back at once.")(command)


def find(run: str | None, runs_dir: str | None) -> RunDir:
    """The requested run; raises UsageError with a hint when there is none."""
    return find_run(run, runs_folder(runs_dir))

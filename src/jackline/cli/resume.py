"""`jackline resume`: the next attempt of a run that stopped or died."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from jackline.errors import CannotResume, UsageError
from jackline.rundir.find import find_run, runs_folder
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import RunFile, read_run_file
from jackline.rundir.status import read_status


@click.command(short_help="Go on with a run that stopped or died.")
@click.argument("run", required=False, metavar="[RUN|MIRROR]")
@click.option("--detach", is_flag=True, help="Start it and come back at once.")
@click.option("--here", is_flag=True, help="It was last seen on another machine and has ended there: go on here.")
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(run: str | None, detach: bool, here: bool, runs_dir: str | None) -> None:
    """Start the next attempt with the same command, from the newest whole checkpoint Jackline knows of.

    RUN is a name, a run's folder, or the place that was given as --mirror: then its records and newest checkpoint are
    brought here first.
    """
    from jackline.cli import showing
    from jackline.supervisor.options import SuperviseOptions

    found = bring_here(run, runs_folder(runs_dir)) if run else None
    here = here or found is not None
    found = found or find_run(run, runs_folder(runs_dir))
    contents = read_run_file(found)
    check_resumable(found, contents, here=here)
    os.chdir(contents.cwd)
    options = SuperviseOptions.from_json(contents.options)
    sys.exit(showing.start_and_show(found, options, is_new=False, detach=detach))


def bring_here(word: str, folder: Path) -> RunDir | None:
    """The run out of a mirror; None when `word` does not mean one."""
    from jackline.cli.showing import say
    from jackline.supervisor.mirror_fetch import fetch_stranger, is_mirror

    if (folder / word / "run.json").exists() or not is_mirror(word):
        return None
    fetched = fetch_stranger(word, folder, Path.cwd())
    for text in fetched.said:
        say(text)
    return fetched.run


def check_resumable(run: RunDir, contents: RunFile, *, here: bool) -> None:
    state = read_status(run).state
    if state in ("alive", "unwatched"):
        raise UsageError(f"run '{run.name}' is alive", hint=f"jackline watch {run.name}")
    if state == "finished":
        raise UsageError(f"run '{run.name}' has finished", hint="start it again: jackline run --new -- ...")
    if state == "elsewhere" and not here:
        raise UsageError(
            f"run '{run.name}' was last seen on '{contents.host}'; whether it lives cannot be told from here",
            hint=f"once you know that it ended there: jackline resume {run.name} --here",
        )
    if not Path(contents.cwd).is_dir():
        raise CannotResume(
            f"run '{run.name}' ran in {contents.cwd}, which is not here",
            hint="make that folder with the script in it, or start anew from where the script is",
        )

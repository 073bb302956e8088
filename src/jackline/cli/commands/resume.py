"""`jackline resume`: the next attempt of a run that was stopped, crashed or was killed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jackline.errors import CannotResume, UsageError
from jackline.rundir.find import find_run, runs_folder
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import RunFile, read_run_file
from jackline.rundir.status import read_status

if TYPE_CHECKING:
    from jackline.supervisor.options import SuperviseOptions


@click.command(short_help="Resume a run that stopped or crashed.")
@click.argument("run", required=False, metavar="[RUN|MIRROR]")
@click.option(
    "--step", metavar="N", help="From this earlier checkpoint; later ones are left behind, none is deleted."
)
@click.option(
    "--from", "path", metavar="PATH", help="From this one of your script's own checkpoints (--checkpoints)."
)
@click.option(
    "--from-scratch", is_flag=True, help="From the beginning, although this run has checkpoints of its own."
)
@click.option("--detach", is_flag=True, help="Start it and come back at once.")
@click.option("--here", is_flag=True, help="It was last seen on another machine and has ended there: resume here.")
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(run: str | None, runs_dir: str | None, **given: Any) -> None:
    """Start the next attempt with the same command, from the newest whole checkpoint Jackline knows of.

    RUN is a name, a run's folder, or the place that was given as --mirror: then its records and newest checkpoint are
    brought here first. --step N goes back: also in a run that has finished.
    --from and --from-scratch are for a script's own checkpoints: which one was loaded last, and whether it can be
    trusted, is told by `jackline status`.
    """
    from jackline.cli.view import showing
    from jackline.supervisor.options import SuperviseOptions

    brought = bring_here(run, runs_folder(runs_dir)) if run else None
    found, mirror = brought or (find_run(run, runs_folder(runs_dir)), None)
    contents = read_run_file(found)
    step, is_back = given["step"], any(given[name] for name in ("step", "path", "from_scratch"))
    check_resumable(found, contents, here=given["here"] or brought is not None, is_back=is_back)
    options = SuperviseOptions.from_json(contents.options)
    if step is not None:
        go_back(found, options, step, mirror)
    options = with_origin(found, options, given["path"], from_scratch=given["from_scratch"])
    os.chdir(contents.cwd)
    sys.exit(showing.start_and_show(found, options, detach=given["detach"]))


def with_origin(run: RunDir, options: SuperviseOptions, path: str | None, *, from_scratch: bool) -> SuperviseOptions:
    """Add what the user chose for the next attempt; only for runs with --checkpoints."""
    if path is None and not from_scratch:
        return options
    if path is not None and from_scratch:
        raise UsageError("--from and --from-scratch exclude each other")
    if options.checkpoints is None:
        word = "--from-scratch" if from_scratch else "--from"
        raise UsageError(
            f"{word} is for a script's own checkpoints; run '{run.name}' was started without --checkpoints",
            hint="Jackline's own checkpoints: jackline resume --step N; from the beginning: jackline run --new",
        )
    full = str(Path(path).expanduser().absolute()) if path is not None else None
    return replace(options, start_from=full, from_scratch=from_scratch)


def go_back(run: RunDir, options: SuperviseOptions, step: str, mirror: str | None) -> None:
    """Go back before the attempt starts; raises when that checkpoint cannot be resumed from."""
    from jackline.checkpoint import rewind
    from jackline.cli.view.showing import say

    if options.checkpoints is not None:
        raise UsageError(
            f"--step is for Jackline's own checkpoints; run '{run.name}' writes its own ({options.checkpoints})",
            hint=f"name the file or folder: jackline resume {run.name} --from PATH",
        )
    rewind.go_back(run, step, mirror=mirror, say=say)


def bring_here(word: str, folder: Path) -> tuple[RunDir, str] | None:
    """Download a run from a mirror; return it with the mirror's location. None when `word` does not name a mirror."""
    from jackline.cli.view.showing import say
    from jackline.supervisor.foreign.fetch import fetch_stranger, find_in_mirror, is_mirror

    if (folder / word / "run.json").exists() or not is_mirror(word):
        return None
    fetched = fetch_stranger(word, folder, Path.cwd())
    for text in fetched.said:
        say(text)
    return fetched.run, find_in_mirror(word)[0]


def check_resumable(run: RunDir, contents: RunFile, *, here: bool, is_back: bool = False) -> None:
    state = read_status(run).state
    if state in ("alive", "unwatched"):
        raise UsageError(f"run '{run.name}' is alive", hint=f"jackline watch {run.name}")
    if state == "finished" and not is_back:
        raise UsageError(
            f"run '{run.name}' has finished",
            hint="start it again: jackline run --new -- ...; or go back: jackline resume --step N",
        )
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

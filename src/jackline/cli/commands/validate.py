"""`jackline validate`: a full validation now, not only at the end."""

from __future__ import annotations

import os

import click

from jackline.errors import UsageError
from jackline.rundir.access.writing import open_own
from jackline.rundir.find import find_only_live, find_run, runs_folder
from jackline.rundir.status import read_status


@click.command(short_help="Ask a training for a validation on all its validation data, now.")
@click.argument("run", required=False)
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(run: str | None, runs_dir: str | None) -> None:
    """Ask a run of `jackline train` to validate on all its validation data after the step at work.

    Training continues afterwards as if nothing had been. The result is printed, logged as METRIC_full and shown by
    `jackline status`. Without RUN it must be clear which one is meant.
    """
    folder = runs_folder(runs_dir)
    found = find_run(run, folder) if run else find_only_live(folder)
    status = read_status(found)
    if status.state not in ("alive", "unwatched"):
        raise UsageError(
            f"run '{found.name}' is not running: it is {status.state}",
            hint=f"`jackline resume {found.name}` continues it; a training validates in full at its end by itself",
        )
    if not found.config_file.exists():
        raise UsageError(
            f"run '{found.name}' is not a training of ours, or has not come to its first step yet",
            hint="`jackline train` validates; a script under `jackline run` does so itself",
        )
    os.close(open_own(found.validation_request, os.O_WRONLY | os.O_CREAT))
    click.echo(f"asked run '{found.name}' for a full validation; `jackline logs {found.name}` shows it")

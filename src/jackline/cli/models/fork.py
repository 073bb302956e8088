"""`jackline fork RUN --step N lr=...`: a new run from a checkpoint of another.

Owns the choice of the checkpoint and how the new folder is filled. What changed settings mean is again.py's.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.manifest import Damage, Name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.place import choose_place
from jackline.checkpoint.rewind import parse_choice
from jackline.cli.commands.resume import options_of
from jackline.cli.commands.run import describe_here
from jackline.cli.models.again import Changed, change, receipt, refuse_done, refuse_scripts
from jackline.cli.options import detach_options, quiet_option
from jackline.cli.programs.started import is_detached_as_json
from jackline.cli.trusting import confirm, trust_option
from jackline.errors import UsageError
from jackline.rundir.create import Claim, claim_filled
from jackline.rundir.find import find_run, runs_folder
from jackline.rundir.identity import numbered_name
from jackline.rundir.kin import FORKED
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import RunFile, check_name, read_run_file

if TYPE_CHECKING:
    from jackline.supervisor.options import SuperviseOptions


@click.command(short_help="A new run from a checkpoint of another, with other settings.")
@click.argument("run")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE...]")
@click.option("--step", metavar="N", help="From this checkpoint; default: the newest.")
@click.option("--name", help="Name of the new run; default: RUN-fork.")
@click.option("--restart-schedule", is_flag=True, help="Begin the learning rate's schedule anew, with its warm-up.")
@detach_options
@quiet_option
@trust_option
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(run: str, settings: tuple[str, ...], runs_dir: str | None, **given: Any) -> None:
    """Branch off a run of a recipe: a new run that begins with the weights, optimizer and position of RUN at a step.

    \b
    jackline fork demo-3f2a91 --step 500 lr=3e-4
    jackline fork demo-3f2a91 max_steps=2000 --restart-schedule --name longer

    RUN itself is left as it is, also while it trains. `jackline runs` shows forks below the run they come from.
    """
    from jackline.cli.view import showing

    parent = find_run(run, runs_folder(runs_dir))
    confirm(parent, is_trusted=given["trust"])
    contents = read_run_file(parent)
    refuse_scripts(parent, contents)
    place, name = _choose(parent, given["step"])
    made = RunDir(parent.path.parent / _free_name(parent, given["name"]))
    restarts = [f"schedule_start={name.step}"] if given["restart_schedule"] else []
    changed = change(parent, contents, (*settings, *restarts), path=made.path.absolute())
    refuse_done(parent, changed, name.step)
    changed.settings[FORKED] = f"{parent.name} at step {name.step}"
    options = options_of(parent, contents)
    claim = _make(made, place / str(name), changed, options)
    for line in changed.differences:
        showing.say(f"with a change: {line}")
    for line in receipt(contents.settings, changed.settings, name.step):
        showing.say(line)
    showing.say(f"run '{made.name}' begins with {name} of '{parent.name}'")
    how = showing.How(given["detach"], is_detached_as_json(given), given["quiet"])
    sys.exit(showing.start_and_show(made, options, how, claim=claim))


def _choose(parent: RunDir, step: str | None) -> tuple[Path, Name]:
    """The checkpoint, verified."""
    folder = choose_place(parent).folder
    names = catalogue.list_names(folder)
    if not names:
        raise UsageError(
            f"run '{parent.name}' has no checkpoint", hint=f"how far it is: jackline status {parent.name}"
        )
    wanted = parse_choice(step) if step is not None else None
    found = next((name for name in names if wanted is None or wanted.means(name)), None)
    if found is None:
        known = ", ".join(str(name.step) for name in names[:8])
        raise UsageError(f"run '{parent.name}' has no checkpoint {wanted}", hint=f"there are steps {known}")
    try:
        verify_checkpoint(folder / str(found))
    except Damage as damage:
        raise UsageError(f"{found} is not whole: {damage}", hint="choose another with --step") from None
    return folder, found


def _free_name(parent: RunDir, name: str | None) -> str:
    folder = parent.path.parent
    if name is None:
        return numbered_name(f"{parent.name}-fork", [path.name for path in folder.iterdir()])
    if (folder / check_name(name)).exists():
        raise UsageError(f"there is a run '{name}' already", hint="another --name")
    return name


def _make(made: RunDir, checkpoint: Path, changed: Changed, options: SuperviseOptions) -> Claim:
    """The new run's folder, with the checkpoint in it. Files of a checkpoint never change, so they are linked."""

    def fill(draft: RunDir) -> RunFile:
        place = choose_place(made)
        folder = draft.checkpoints if place.folder == made.checkpoints else place.folder
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=_link)
        return describe_here(made.name, changed.argv, changed.settings, options)

    return claim_filled(made, fill)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target

"""A run once more with other settings: `jackline resume RUN lr=...`, `jackline fork RUN --step N lr=...`.

Owns what a changed setting means for a run that has begun, and what is said about it: the settings, the learning rate
before and after, and whether the schedule is stretched or begins anew. The trainer reads the settings, as always.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.manifest import Damage, Name
from jackline.checkpoint.format.verify import verify_checkpoint
from jackline.checkpoint.place import choose_place
from jackline.checkpoint.rewind import parse_choice
from jackline.cli.commands.runs import FORKED
from jackline.cli.commands.train import folder_settings, resolve
from jackline.cli.options import detach_options, quiet_option
from jackline.cli.programs.started import is_detached_as_json
from jackline.cli.trusting import confirm
from jackline.errors import JacklineError, UsageError
from jackline.rundir.command import plain_settings
from jackline.rundir.find import find_run, runs_folder
from jackline.rundir.identity import compare_settings, numbered_name
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import RunFile, check_name, read_run_file
from jackline.trainer.optim.schedule import Schedule, lr_at, schedule_of

if TYPE_CHECKING:
    from jackline.supervisor.options import SuperviseOptions

_TRAINER = ["-m", "jackline.trainer"]
_SCHEDULE = ("lr", "min_lr", "schedule", "warmup_steps", "decay_steps", "max_steps", "epochs", "schedule_start")


@dataclass(frozen=True)
class Changed:
    """The command and the settings of the next attempt, and what differs: 'lr: 0.001 -> 0.0003'."""

    argv: list[str]
    settings: dict[str, Any]
    differences: tuple[str, ...]


def is_setting(word: str) -> bool:
    """'lr=1e-4', and neither a path nor an address."""
    key, equals, _ = word.partition("=")
    return bool(equals) and key.replace("-", "_").isidentifier()


def change(run: RunDir, contents: RunFile, words: Sequence[str], *, path: Path | None = None) -> Changed:
    """The run's own command with these settings behind its own. `path`: the folder of a run that is made from it."""
    argv = list(contents.argv)
    if argv[1:3] != _TRAINER or len(argv) < 5:
        raise UsageError(
            f"run '{run.name}' is no recipe's, so it has no settings that could be changed",
            hint="a script of your own: jackline run --name NAME --continue-with-changes -- python train.py ...",
        )
    wrong = [word for word in words if not is_setting(word)]
    if wrong:
        raise UsageError(f"'{wrong[0]}' is not a setting", hint="write key=value, such as max_steps=2000 lr=1e-4")
    recipe, old = argv[4], argv[5:]
    os.chdir(contents.cwd)  # paths in settings are from there
    found = resolve(argv[:3], recipe, (*old, *words))
    settings = {**found["identity"], **folder_settings(found["config"])}
    if FORKED in contents.settings:
        settings[FORKED] = contents.settings[FORKED]
    made = [*argv[:3], str(path or argv[3]), recipe, *old, *words]
    return Changed(made, settings, compare_settings(plain_settings(contents.settings), settings))


def newest_step(run: RunDir) -> int:
    names = catalogue.list_names(choose_place(run).folder)
    return names[0].step if names else 0


def receipt(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    """What the change means from `step` on, in sentences."""
    lines = []
    if before.get("batch_size") != now.get("batch_size"):
        sizes = f"batch_size {before.get('batch_size')} -> {now.get('batch_size')}"
        order = "the data continue in their order, and no sample of this epoch comes twice"
        lines.append(f"{sizes} from step {step:,} on: {order}")
    if all(before.get(name) == now.get(name) for name in _SCHEDULE):
        return lines
    old, new = schedule_from(before), schedule_from(now)
    if old is None or new is None:
        return [*lines, "the schedule is that of the new number of epochs"]
    rates = f"the learning rate is {lr_at(max(0, step - 1), old):.3g} -> {lr_at(step, new):.3g} at step {step:,}"
    if new.begins_at and new.begins_at != old.begins_at:
        return [*lines, f"the schedule begins anew at step {new.begins_at:,}, for {new.total_steps:,} steps: {rates}"]
    last = new.begins_at + new.total_steps
    if last != old.begins_at + old.total_steps:
        text = f"the {new.kind} schedule is now that of a run of {last:,} steps: {rates}"
        return [*lines, text, "hint: --restart-schedule begins it anew here instead, with its warm-up"]
    return [*lines, rates]


def schedule_from(settings: Mapping[str, Any]) -> Schedule | None:
    """Of a recipe's settings; None where the number of steps follows from the data."""
    if settings.get("epochs"):
        return None
    try:
        return schedule_of(SimpleNamespace(**{"schedule_start": 0, **settings}))
    except (JacklineError, AttributeError, TypeError):
        return None


def refuse_done(run: RunDir, changed: Changed, step: int) -> None:
    """Raise where a run that is complete would have nothing to do with the new settings either."""
    total = changed.settings.get("max_steps")
    if not changed.settings.get("epochs") and isinstance(total, int) and total <= step:
        raise UsageError(
            f"run '{run.name}' has done {step:,} steps, and max_steps={total}",
            hint=f"more steps: jackline resume {run.name} max_steps={2 * step}; from an earlier one: jackline fork",
        )


# -- fork ------------------------------------------------------------------------------------------------------------


@click.command(short_help="A new run from a checkpoint of another, with other settings.")
@click.argument("run")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE...]")
@click.option("--step", metavar="N", help="From this checkpoint; default: the newest.")
@click.option("--name", help="Name of the new run; default: RUN-fork.")
@click.option("--restart-schedule", is_flag=True, help="Begin the learning rate's schedule anew, with its warm-up.")
@detach_options
@quiet_option
@click.option("--runs-dir", type=click.Path(), help="Where runs are kept; default: $JACKLINE_RUNS or ./runs.")
def command(run: str, settings: tuple[str, ...], runs_dir: str | None, **given: Any) -> None:
    """Branch off a run of a recipe: a new run that begins with the weights, optimizer and position of RUN at a step.

    \b
    jackline fork demo-3f2a91 --step 500 lr=3e-4
    jackline fork demo-3f2a91 max_steps=2000 --restart-schedule --name longer

    RUN itself is left as it is, also while it trains. `jackline runs` shows forks below the run they come from.
    """
    from jackline.cli.commands.resume import options_of
    from jackline.cli.view import showing

    parent = find_run(run, runs_folder(runs_dir))
    confirm(parent, is_trusted=False)
    contents = read_run_file(parent)
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
        raise UsageError(f"run '{parent.name}' has no checkpoint", hint="jackline checkpoints lists them")
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


def _make(made: RunDir, checkpoint: Path, changed: Changed, options: SuperviseOptions) -> Any:
    """The new run's folder, with the checkpoint in it. Files of a checkpoint never change, so they are linked."""
    from jackline.cli.commands.run import describe_here
    from jackline.rundir.create import claim_filled

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

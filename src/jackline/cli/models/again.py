"""A run once more with other settings, for `jackline resume RUN lr=...` and `jackline fork RUN --step N lr=...`.

Owns what a changed setting means for a run that has begun, and what is said about it: the settings, the learning rate
before and after, and whether the schedule is stretched or begins anew. The trainer reads the settings, as always.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.place import choose_place
from jackline.cli.commands.train import folder_settings, resolve
from jackline.errors import JacklineError, UsageError
from jackline.immutable import immutable
from jackline.rundir.command import plain_settings
from jackline.rundir.identity import compare_settings
from jackline.rundir.kin import FORKED
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import RunFile
from jackline.trainer.optim.schedule import Schedule, lr_at, schedule_of

_TRAINER = ["-m", "jackline.trainer"]
_SCHEDULE = ("lr", "min_lr", "schedule", "warmup_steps", "decay_steps", "max_steps", "epochs", "schedule_start")


@immutable
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
    refuse_scripts(run, contents)
    argv = list(contents.argv)
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


def refuse_scripts(run: RunDir, contents: RunFile) -> None:
    """Only runs of `jackline train` have settings."""
    if list(contents.argv[1:3]) != _TRAINER or len(contents.argv) < 5:
        raise UsageError(
            f"run '{run.name}' was not started by `jackline train`, so it has no settings to change",
            hint="a script of your own: jackline run --name NAME --continue-with-changes -- python train.py ...",
        )


def newest_step(run: RunDir) -> int:
    names = catalogue.list_names(choose_place(run).folder)
    return names[0].step if names else 0


def receipt(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    """What the change means from `step` on, in sentences."""
    lines = []
    if before.get("batch_size") != now.get("batch_size"):
        sizes = f"batch_size {before.get('batch_size')} -> {now.get('batch_size')}"
        order = "the order of the data continues, and no sample of this epoch comes twice"
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

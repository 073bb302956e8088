"""`jackline sweep RECIPE lr=1e-3,3e-4 seed=1..3`: one training for each combination, then a table and the curves.

Each combination is a run of its own, with the name it would have with `jackline train`. So a sweep needs no file: the
same command again skips what has finished and resumes what has not. Owns the grid, the order and the table.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from jackline.cli.commands.train import check_device, folder_settings, resolve
from jackline.cli.models.together import (
    STOPPED,
    Combination,
    Limits,
    planned_needs,
    say,
    start,
    train_together,
)
from jackline.cli.options import runs_dir_option
from jackline.cli.text.paint import print_out, stdout_columns, stdout_has_color
from jackline.cli.text.table import Cell, Column, draw_table
from jackline.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, JacklineError, UsageError
from jackline.extras import TRAINING, require
from jackline.rundir.command import plain_settings
from jackline.rundir.find import runs_folder
from jackline.rundir.identity import compare_settings, default_name
from jackline.rundir.kin import find_same
from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import read_series
from jackline.rundir.run_file import read_run_file
from jackline.rundir.status import read_status
from jackline.trainer.recipe import find_recipe, is_own_file

MOST = 200
MOST_AT_ONCE = 64
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}


@click.command(context_settings=_SETTINGS, short_help="Train every combination of some settings; a table at the end.")
@click.argument("recipe")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print the combinations and their runs; start nothing.")
@click.option("--at-once", default="1", show_default=True, help="Trainings at the same time; auto: as many as fit.")
@runs_dir_option
def command(recipe: str, settings: tuple[str, ...], dry_run: bool, at_once: str, runs_dir: str | None) -> None:
    """Train RECIPE with every combination of the settings that have several values.

    \b
    jackline sweep demo lr=1e-3,3e-4 seed=1..3 max_steps=500
    jackline sweep my_recipe.py width=16,32,64 --quick

    The same command again continues: finished runs are skipped, stopped ones are resumed. Ctrl-C saves the runs that
    train now and ends the sweep. With --at-once their output is in `jackline logs RUN` only. auto: on a GPU as many
    as the memory plan says fit, each with its part of the GPU; on a CPU as many as host memory allows, by what
    those that train already need. Never more than CPU cores.
    """
    if at_once != "auto" and not (at_once.isdigit() and 1 <= int(at_once) <= MOST_AT_ONCE):
        raise UsageError(f"--at-once {at_once} is no number from 1 to {MOST_AT_ONCE}", hint="or auto")
    if not is_own_file(recipe):
        find_recipe(recipe)
    names, rows = grid(settings)
    folder = runs_folder(runs_dir)
    require(f"recipe '{recipe}'", "train", TRAINING)
    made = [_combination(recipe, words, varied, folder) for words, varied in rows]
    if dry_run:
        print_out(table(names, made))
        return
    how = "one after another" if at_once == "1" else f"{at_once} at once"
    say(f"{len(made)} trainings, {how}: {', '.join(names)}")
    titles = [
        f"{number} of {len(made)}: {' '.join(map('='.join, zip(names, one.varied, strict=True)))}"
        for number, one in enumerate(made, 1)
    ]
    left = [(title, one) for title, one in zip(titles, made, strict=True) if one.state != "finished"]
    for title, one in zip(titles, made, strict=True):
        if one.state == "finished":
            say(f"{title}: has finished, as run '{one.run.name}'")
    if at_once == "1":
        codes = _one_by_one(recipe, left, runs_dir)
    else:
        needs = planned_needs(recipe, [one for _, one in left]) if at_once == "auto" else {}
        limits = Limits(number=None if at_once == "auto" else int(at_once), needs=needs)
        codes = train_together(recipe, left, limits, runs_dir)
    _show(names, made, runs_dir)
    bad = [code for code in codes if code]
    sys.exit(EXIT_DONE if not bad else EXIT_STOPPED if bad[-1] in (EXIT_STOPPED, 130) else EXIT_FAILED)


def _one_by_one(recipe: str, left: Sequence[tuple[str, Combination]], runs_dir: str | None) -> list[int]:
    codes: list[int] = []
    for title, one in left:
        say(title)
        codes.append(_train([recipe, *one.words], runs_dir))
        if codes[-1] in STOPPED:
            say("the sweep was stopped; the same command again continues it")
            break
    return codes


def grid(settings: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[tuple[str, ...], tuple[str, ...]]]]:
    """Names of the settings with several values, and (all words, the values of these) of each combination."""
    plain: list[str] = []
    several: dict[str, list[str]] = {}
    for word in settings:
        name, equals, text = word.partition("=")
        found = values_of(text) if equals else []
        if len(found) > 1:
            several[name.lstrip("-").replace("-", "_")] = found
        else:
            plain.append(word if len(found) != 1 else f"{name}={found[0]}")
    if not several:
        raise UsageError(
            "no setting has several values, so there is nothing to compare",
            hint="jackline sweep demo lr=1e-3,3e-4 seed=1..3",
        )
    count = math.prod(map(len, several.values()))
    if count > MOST:
        raise UsageError(f"these are {count:,} trainings", hint=f"at most {MOST}; fewer values of one setting")
    rows = []
    for values in itertools.product(*several.values()):
        words = tuple(f"{name}={value}" for name, value in zip(several, values, strict=True))
        rows.append(((*plain, *words), values))
    return tuple(several), rows


def values_of(text: str) -> list[str]:
    """'1e-3,3e-4' and '1..3' are several values; anything else is one."""
    found: list[str] = []
    for part in text.split(","):
        if ends := _RANGE.fullmatch(part):
            first, last = int(ends[1]), int(ends[2])
            if abs(last - first) >= MOST:
                raise UsageError(f"{part} has {abs(last - first) + 1:,} values", hint=f"at most {MOST}")
            found += map(str, range(first, last + 1) if first <= last else range(first, last - 1, -1))
        else:
            found.append(part)
    if len(found) > 1 and not all(found):
        raise UsageError(f"'{text}' has an empty value", hint="values are separated by one comma: lr=1e-3,3e-4")
    return list(dict.fromkeys(found))


def _combination(recipe: str, words: tuple[str, ...], varied: tuple[str, ...], folder: Path) -> Combination:
    """Every one is resolved before the first is started: a wrong value costs seconds, not a night."""
    found = resolve([sys.executable, "-m", "jackline.trainer"], recipe, words)
    check_device(found["config"]["device"])
    settings = {**found["identity"], **folder_settings(found["config"])}
    run = find_same(folder, default_name([recipe], found["identity"]), settings).run
    config, is_high_good = found["config"], bool(found["is_high_good"])
    return Combination(words, varied, run, config, is_high_good, state_of(run, settings))


def state_of(run: RunDir, settings: dict[str, Any]) -> str:
    """'not begun', a state of `jackline runs`, or that the run of this name was continued with other settings."""
    try:
        if not run.has_run_file:
            return "not begun"
        is_same = not compare_settings(plain_settings(read_run_file(run).settings), settings)
        return read_status(run).state if is_same else "other settings"
    except JacklineError:
        return "damaged"


def _train(words: list[str], runs_dir: str | None) -> int:
    with start(words, runs_dir) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the viewer has got it too, and stops its run


def _show(names: tuple[str, ...], made: Sequence[Combination], runs_dir: str | None) -> None:
    from jackline.cli.plot.command import MAX_RUNS
    from jackline.cli.plot.command import command as plot

    begun = [one for one in made if one.run.has_run_file]
    print_out(table(names, made))
    drawn = [one.run.name for one in begun if series_of(one.run, "loss")][:MAX_RUNS]
    if drawn:
        context = click.get_current_context()
        context.invoke(plot, runs=tuple(drawn), metrics=("loss",), runs_dir=runs_dir)


def table(names: Sequence[str], made: Sequence[Combination]) -> str:
    """One line a combination, the best one first."""
    columns = [*(Column(name.upper()) for name in names), Column("STATE"), Column("STEPS", is_right=True)]
    columns += [Column("LOSS", is_right=True), Column(f"BEST {made[0].metric}".upper(), is_right=True), Column("RUN")]
    rows: list[tuple[float, list[Cell | str]]] = []
    for one in made:
        is_own = one.state != "other settings"
        best = best_of(one) if is_own else None
        loss = series_of(one.run, "loss") if is_own else []
        state = one.state if not is_own or not one.run.has_run_file else read_status(one.run).state
        steps = f"{loss[-1][0]:,.0f}" if loss else "-"
        last = f"{loss[-1][1]:.4f}" if loss else "-"
        shown = f"{best:.4f}" if best is not None else "-"
        rank = math.inf if best is None else -best if one.is_high_good else best
        rows.append((rank, [*one.varied, state, steps, last, shown, one.run.name]))
    rows.sort(key=lambda row: row[0])
    return draw_table(tuple(columns), [row for _, row in rows], width=stdout_columns(), use_color=stdout_has_color())


def best_of(one: Combination) -> float | None:
    values = [value for _, value in series_of(one.run, one.metric) if math.isfinite(value)]
    return (max(values) if one.is_high_good else min(values)) if values else None


def series_of(run: RunDir, name: str) -> list[tuple[float, float]]:
    """(step, value) of what was logged by that name."""
    if not run.has_run_file:
        return []
    found = [series for series in read_series(run) if series.name == name and series.source == "session"]
    return [(point.step, point.value) for series in found for point in series.points if point.step is not None]

"""`jackline diff`: what differs between two runs, and the first step at which their losses part."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from jackline.cli.mirrored import find_to_read
from jackline.cli.options import json_option, runs_dir_option
from jackline.cli.text.safety import safe_text
from jackline.cli.view import run_view
from jackline.review.compare import Difference, Parting, Values, differences, part
from jackline.review.facts import read_facts
from jackline.review.goodput import account
from jackline.review.history import read_history, steps_per_s
from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import Series, read_series
from jackline.rundir.records.supervisor import read_supervisor
from jackline.units import format_bytes

SCHEMA = 1
SHOWN = 40
NEAR_STEPS = 50
FIRST = ("loss", "train_loss", "val_loss", "eval_loss")


@click.command(short_help="What differs between two runs, and where their losses part.")
@click.argument("one")
@click.argument("other")
@click.option("--like", multiple=True, help="Another run that was started like ONE: gives the noise. Repeatable.")
@click.option("--metric", help="The number to compare; default: the loss.")
@json_option
@runs_dir_option
def command(
    one: str, other: str, like: tuple[str, ...], metric: str | None, as_json: bool, runs_dir: str | None
) -> None:
    """Compare run ONE with run OTHER: command, settings, code, data, packages, machine, speed, memory and loss.

    Only recorded facts are compared. With replicates (--like), a difference of the losses counts once it is larger
    than the noise between them; without, once it is larger than one percent.
    """
    runs = [find_to_read(name, runs_dir) for name in (one, other)]
    series = [read_series(run) for run in runs]
    name = metric or _common_metric(*series)
    values = [_values(each, name) for each in series]
    replicates = [_values(read_series(find_to_read(each, runs_dir)), name) for each in like]
    found = differences(read_facts(runs[0]), read_facts(runs[1]))
    parting = part(name, values[0], values[1], replicates) if name else None
    if as_json:
        told = {"schema": SCHEMA, "one": runs[0].name, "other": runs[1].name}
        facts = {"differences": [asdict(each) for each in found], "metric": asdict(parting) if parting else None}
        click.echo(json.dumps({**told, **facts, "measured": [_measured(run) for run in runs]}, indent=1))
        return
    lines = [*_difference_lines(found), *_measured_lines(runs), *_parting_lines(parting, runs)]
    click.echo("\n".join([f"{safe_text(runs[0].name, 60)}  against  {safe_text(runs[1].name, 60)}", *lines]))


def _common_metric(one: tuple[Series, ...], other: tuple[Series, ...]) -> str:
    common = {series.name for series in one} & {series.name for series in other}
    return next((name for name in FIRST if name in common), min(common, default=""))


def _values(series: tuple[Series, ...], name: str) -> Values:
    found = next((each for each in series if each.name == name), None)
    points = found.points if found is not None else ()
    return {point.step: point.value for point in points if point.step is not None}


def _difference_lines(found: list[Difference]) -> list[str]:
    if not found:
        return [
            "  nothing that was recorded differs: command, settings, code, data, packages and machine are the same"
        ]
    lines, section = [], ""
    for each in found[:SHOWN]:
        if each.section != section:
            section = each.section
            lines.append(f"  {section}")
        one, other = (safe_text(value, 60) if value is not None else "(absent)" for value in (each.one, each.other))
        lines.append(f"    {safe_text(each.name, 50)}: {one} -> {other}")
    if len(found) > SHOWN:
        lines.append(f"    and {len(found) - SHOWN} more: --json shows all")
    return lines


def _measured(run: RunDir) -> dict[str, Any]:
    history = read_history(run, now_s=run_view.wall_clock_s())
    rates = sorted(rate for _, rate in steps_per_s(history.marks))
    return {
        "steps_per_s": rates[len(rates) // 2] if rates else None,
        "peak_bytes": read_supervisor(run).memory.peak_bytes,
        "goodput": account(history.attempts, history.marks).goodput,
        "attempts": len(history.attempts),
    }


def _measured_lines(runs: list[RunDir]) -> list[str]:
    one, other = map(_measured, runs)
    texts: dict[str, tuple[str, Callable[[Any], str]]] = {
        "steps_per_s": ("steps a second", lambda value: f"{value:.3g}"),
        "peak_bytes": ("host RAM, peak", format_bytes),
        "goodput": ("goodput", lambda value: f"{100 * value:.1f} %"),
        "attempts": ("attempts", str),
    }
    lines = ["  measured"]
    for name, (title, text) in texts.items():
        if one[name] is not None and other[name] is not None:
            lines.append(f"    {title}: {text(one[name])} -> {text(other[name])}")
    return lines if len(lines) > 1 else []


def _parting_lines(parting: Parting | None, runs: list[RunDir]) -> list[str]:
    if parting is None or not parting.num_common:
        return ["  no number was reported by both at the same step"]
    metric = safe_text(parting.metric, 40)
    if parting.first_unequal is None:
        return [f"  {metric}: equal to the last bit at all {parting.num_common:,} common steps"]
    lines = [f"  {metric}: first unequal at step {parting.first_unequal:,.0f}" + _until(parting)]
    measure = f"the noise of {parting.noise:.3g}" if parting.noise is not None else "one percent"
    if parting.parts_at is None:
        lines.append(f"    it never stays apart by more than {measure}")
    else:
        lines.append(f"    apart by more than {measure} from step {parting.parts_at:,.0f} on")
        lines += [f"    around then: {text}" for text in _events_near(runs, parting.parts_at)]
    lines.append(f"    last common value: {parting.one_last:.6g} -> {parting.other_last:.6g}")
    return lines


def _until(parting: Parting) -> str:
    return f", equal to the bit until {parting.equal_until:,.0f}" if parting.equal_until is not None else ""


def _events_near(runs: list[RunDir], step: float) -> list[str]:
    """What happened to either run within some steps of the place where they part."""
    from jackline.review.summary import read_events

    found = []
    for run in runs:
        for event in read_events(run):
            at = event.facts.get("step")
            if isinstance(at, int | float) and abs(at - step) <= NEAR_STEPS and event.event != "complete":
                found.append(f"{safe_text(run.name, 40)}, step {at:,.0f}: {safe_text(event.text or '', 120)}")
    return found[:6]

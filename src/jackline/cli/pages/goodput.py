"""`jackline goodput`: where the wall time of runs went, and what it cost."""

from __future__ import annotations

import json
from typing import Any

import click

from jackline.cli.mirrored import find_to_read
from jackline.cli.options import json_option, price_option, runs_dir_option
from jackline.cli.text.safety import safe_text
from jackline.cli.view import run_view
from jackline.review.goodput import MICRO, Account, account, best_saving, cost_line, costs
from jackline.review.history import read_history
from jackline.rundir.layout import RunDir
from jackline.units import format_duration

BAR = 24
SCHEMA = 1


@click.command(short_help="Where the time went: productive, redone, waiting, down; and what it cost.")
@click.argument("runs", nargs=-1)
@price_option
@json_option
@runs_dir_option
def command(runs: tuple[str, ...], price: float | None, as_json: bool, runs_dir: str | None) -> None:
    """Divide the wall time of RUNS among its uses, over all attempts; every second is counted once.

    Without RUNS the only live one, else the newest. `stopped` is time in which a person wanted it to stand still: it
    is shown and not counted as a loss. `unseen` is time in which no supervisor was there to look.
    """
    found = [(run, read_account(run)) for run in (find_to_read(name, runs_dir) for name in runs or (None,))]
    if as_json:
        click.echo(json.dumps([account_json(run, each, price) for run, each in found], indent=1))
        return
    click.echo("\n\n".join(account_text(run, each, price) for run, each in found))


def read_account(run: RunDir) -> Account:
    history = read_history(run, now_s=run_view.wall_clock_s())
    return account(history.attempts, history.marks)


def account_json(run: RunDir, found: Account, price: float | None) -> dict[str, Any]:
    spent = found.seconds()
    return {
        "schema": SCHEMA,
        "name": run.name,
        "path": str(run.path),
        "wall_s": found.wall_us / MICRO,
        "goodput": found.goodput,
        "seconds": spent,
        "best_saving": best_saving(found) or None,
        "cost": None if price is None else costs(found, price),
    }


def account_text(run: RunDir, found: Account, price: float | None) -> str:
    name = safe_text(run.name, 60)
    if not found.spans:
        return f"{name}: no attempt of it has begun"
    goodput = found.goodput
    share = "" if goodput is None else f", {100 * goodput:.1f} % of it productive"
    rows = [f"{name}: {format_duration(found.wall_us / MICRO)} of wall time{share}"]
    meant_us = found.wall_us - found.microseconds()["stopped"]
    for use, seconds in found.seconds().items():
        percent = 100 * seconds * MICRO / meant_us if meant_us > 0 and use != "stopped" else None
        bar = "#" * round(BAR * percent / 100) if percent is not None else ""
        told = f"{percent:5.1f} %" if percent is not None else "       "
        rows.append(f"  {use:<11} {format_duration(seconds):>12}  {told}  {bar}".rstrip())
    if saving := best_saving(found):
        rows.append(f"  largest loss: {saving}")
    if line := cost_line(found, price):
        rows.append(f"  {line}")
    return "\n".join(rows)

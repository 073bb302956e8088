"""`jackline plot`: loss, learning rate, throughput and memory of one or several runs, in the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import click

from jackline.cli.mirrored import find_to_read
from jackline.cli.options import json_option, runs_dir_option
from jackline.cli.plot.canvas import COLORS, LABEL, MARKS, Curve, Style, draw, format_x, format_y, frame_of, x_axis
from jackline.cli.plot.curves import Axis, Panel, RunCurves, choose, panel_of, read_run_curves, summary
from jackline.cli.text.paint import print_out, shorten, stdout_columns, stdout_has_color, stdout_takes
from jackline.cli.text.safety import safe_text
from jackline.errors import UsageError
from jackline.review.chart import thin
from jackline.rundir.find import nearest_name

_PIPE_COLUMNS = 80
_FIRST_ROWS, _NEXT_ROWS = 12, 5
MAX_RUNS = len(COLORS)


@click.command(short_help="Curves in the terminal: loss, learning rate, throughput, memory.")
@click.argument("runs", nargs=-1, metavar="[RUN...]")
@click.option("-m", "--metric", "metrics", multiple=True, help="Only this one: loss, 'val_*'; may be repeated.")
@click.option(
    "-x",
    "--x",
    "axis",
    type=click.Choice(["step", "time", "epoch"]),
    default="step",
    show_default=True,
    help="What runs from left to right.",
)
@click.option("--log", "is_log", is_flag=True, help="Logarithmic y axis.")
@click.option("--height", type=click.IntRange(3, 100), help="Rows of each drawing.")
@click.option("--ascii", "is_ascii", is_flag=True, help="Letters instead of braille dots.")
@click.option("--list", "is_list", is_flag=True, help="Print the names that can be drawn.")
@click.option(
    "--points", type=click.IntRange(min=2), default=200, show_default=True, help="Points of each curve, with --json."
)
@json_option
@runs_dir_option
def command(runs: Sequence[str], metrics: Sequence[str], axis: Axis, runs_dir: str | None, **given: Any) -> None:
    """Draw the curves of RUN; without one, of the only live run, else the newest. Several runs share each drawing.

    \b
    jackline plot                       loss, learning rate, throughput, memory
    jackline plot first second          two runs, one above the other
    jackline plot -m 'val_*' -x time    what was logged by that name, over time

    A run needs no change for this: logged and printed numbers are drawn alike.
    """
    if len(runs) > MAX_RUNS:
        raise UsageError(f"{len(runs)} runs cannot be told apart in one drawing", hint=f"name at most {MAX_RUNS}")
    words: list[str | None] = list(runs) or [None]
    found = list({run.path: run for run in (find_to_read(word, runs_dir) for word in words)}.values())
    known = [read_run_curves(run, safe_text(run.name, 80)) for run in found]
    if given["is_list"]:
        _print_names(known, as_json=given["as_json"])
        return
    panels = [panel_of(known, names, axis) for names in _chosen(known, metrics)]
    if given["as_json"]:
        click.echo(json.dumps(_as_json(known, panels, axis, given["points"])))
        return
    panels = [panel for panel in panels if panel.curves]
    if not panels:
        raise _nothing(known, axis)
    print_out("\n".join(plot_lines(panels, axis, given)))


def _chosen(known: Sequence[RunCurves], metrics: Sequence[str]) -> list[list[str]]:
    chosen = choose(known, metrics)
    for word, names in zip(metrics, chosen, strict=False):
        if not names:
            there = list(dict.fromkeys(series.name for run in known for series in run.series))
            near = nearest_name(word, there)
            hint = f"did you mean '{near}'? `jackline plot --list` prints all" if near else _names_hint(there)
            raise UsageError(f"there is no metric '{safe_text(word, 60)}' in {_names(known)}", hint=safe_text(hint))
    return chosen


def _names_hint(names: Sequence[str]) -> str:
    return f"it has {', '.join(names[:12])}" if names else "log one: run.log(loss=loss), or print it: loss 2.31"


def _names(known: Sequence[RunCurves]) -> str:
    return ", ".join(f"'{run.name}'" for run in known)


def _nothing(known: Sequence[RunCurves], axis: Axis) -> UsageError:
    names = list(dict.fromkeys(series.name for run in known for series in run.series))
    if names and axis != "time":
        return UsageError(f"no number of {_names(known)} has a {axis}", hint="draw it over time: -x time")
    return UsageError(
        f"there is nothing to draw yet: {_names(known)} has no numbers", hint=safe_text(_names_hint(names), 300)
    )


def _print_names(known: Sequence[RunCurves], *, as_json: bool) -> None:
    names = {run.name: [series.name for series in run.series] for run in known}
    if as_json:
        click.echo(json.dumps(names))
        return
    for run in known:
        for series in run.series:
            prefix = f"{run.name}  " if len(known) > 1 else ""
            click.echo(f"{prefix}{safe_text(series.name, 80)}  {len(series.points):,} points, {series.source}")


def plot_lines(panels: Sequence[Panel], axis: Axis, given: dict[str, Any]) -> list[str]:
    """All drawings, one below the other, with one axis of x."""
    use_color = stdout_has_color()
    is_alone = all(len(panel.curves) == 1 for panel in panels)
    # Without colours the dots of two curves look the same, letters do not.
    use_braille = not given["is_ascii"] and stdout_takes("⣿┤") and (use_color or is_alone)
    columns = stdout_columns() or _PIPE_COLUMNS
    lines: list[str] = []
    for number, panel in enumerate(panels):
        rows = given["height"] or (_FIRST_ROWS if number == 0 else _NEXT_ROWS)
        style = Style(columns, rows, use_braille, use_color, given["is_log"])
        frame = frame_of(panel.curves, is_log=style.is_log)
        if frame is None:
            lines.append(f"{safe_text(panel.title, 60)}: no value that can be drawn")
            continue
        lines += _legend(panel, axis, style)
        lines += draw(panel.curves, frame, style)
        lines += [x_axis(frame, columns, axis)]
    return lines


def _legend(panel: Panel, axis: Axis, style: Style) -> list[str]:
    """A line for each curve: its mark, its name, its last value and its range."""
    lines = []
    for number, curve in enumerate(panel.curves):
        mark = "─" if style.use_braille else MARKS[number % len(MARKS)]
        text = shorten(f"{safe_text(curve.name, 60)}  {_figures(curve, axis)}", style.columns - LABEL - 2)
        painted = f"\x1b[{COLORS[number % len(COLORS)]}m{mark}\x1b[0m" if style.use_color else mark
        lines.append(f"{'':{LABEL}}{painted} {text}")
    return lines


def _figures(curve: Curve, axis: Axis) -> str:
    found = summary(curve)
    if found is None:
        return "no finite value"
    last, low, high, where = found
    bad = sum(not math.isfinite(y) for _, y in curve.points)
    text = f"last {format_y(last)}, {format_y(low)} to {format_y(high)}, lowest at {axis} {format_x(where, axis)}"
    return text + (f", {bad:,} not finite" if bad else "")


def _as_json(known: Sequence[RunCurves], panels: Sequence[Panel], axis: Axis, most: int) -> dict[str, Any]:
    """Bounded: every curve has at most `most` points."""
    return {
        "schema": "jackline.plot/1",
        "x": axis,
        "runs": [{"name": run.name, "path": run.path} for run in known],
        "panels": [
            {
                "title": panel.title,
                "curves": [
                    {"name": curve.name, "num_points": len(curve.points), "points": _json_points(curve, most)}
                    for curve in panel.curves
                ],
            }
            for panel in panels
        ],
    }


def _json_points(curve: Curve, most: int) -> list[list[float | None]]:
    """Peaks are kept, and the first values that are not finite (null)."""
    if len(curve.points) <= most:
        return [[x, y if math.isfinite(y) else None] for x, y in curve.points]
    bad = [(x, y) for x, y in curve.points if not math.isfinite(y)][: most // 10]
    kept = thin(curve.points, max(1, (most - len(bad)) // 3))
    return [[x, y if math.isfinite(y) else None] for x, y in sorted([*kept, *bad], key=lambda point: point[0])]

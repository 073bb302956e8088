"""`jackline plot`: curves in the terminal, of any run, in any width."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jackline.cli.plot.canvas import Curve, Frame, Style, draw, frame_of
from jackline.cli.plot.command import command
from jackline.rundir.jsonl import JsonlWriter
from jackline.rundir.layout import RunDir
from tests.rundir.made import make_run

START_S = 1_794_000_000.0


def log(run: RunDir, lines: list[dict[str, Any]], path: Path | None = None) -> RunDir:
    writer = JsonlWriter(path or run.metrics())
    for line in lines:
        writer.append(line)
    writer.close()
    return run


def trained(folder: Path, *, steps: int = 100, slope: float = 1.0) -> RunDir:
    values = [
        {"step": step, "at_s": START_S + 0.5 * step, "loss": slope * 5 / (1 + step / 20), "lr": 1e-3 * step / steps}
        for step in range(1, steps + 1)
    ]
    run = log(make_run(folder), [*values, {"step": steps, "at_s": START_S + 51, "val_loss": slope * 0.9}])
    timeline = [{"at_s": START_S + at, "attempt": 1, "used_bytes": (1 + at) << 30} for at in (0, 20, 40)]
    return log(run, timeline, run.timeline)


@pytest.fixture
def runs(clean_environment: Path) -> Path:
    return clean_environment


def call(*words: str) -> Result:
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.exception
    return result


def refused(*words: str) -> str:
    return str(CliRunner().invoke(command, words).exception)


def test_a_run_is_drawn_with_loss_learning_rate_throughput_and_memory(runs: Path) -> None:
    trained(runs / "mine")
    lines = call("mine").stdout.splitlines()
    legends = [line.split()[1] for line in lines if "last " in line]
    assert legends == ["loss", "val_loss", "lr", "steps_per_s", "ram_gib"]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in "".join(lines)
    loss = lines[2:14]
    assert loss[0].startswith("   4.762 |*")  # it begins at the top left and ends at the bottom right
    assert loss[-1].rstrip().endswith("**o") and loss[-1].startswith("   0.8")
    assert lines[14].split() == ["1", "step", "100"]


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_it_fits_every_terminal(runs: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    trained(runs / "a-run-with-a-very-long-name-that-does-not-fit-into-a-legend")
    trained(runs / "b", slope=2.0)
    monkeypatch.setattr("jackline.cli.text.paint._is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    lines = call("a-run", "b").stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert max(map(len, lines)) >= columns - 2


def test_several_runs_are_told_apart_by_letters_in_a_pipe_and_by_colours_on_a_terminal(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(runs / "first")
    trained(runs / "second", slope=2.0)
    plain = call("first", "second", "-m", "loss").stdout
    assert "* first  last 0.833" in plain and "o second  last 1.667" in plain
    assert "|o" in plain and "*" in plain.splitlines()[-2]
    monkeypatch.setenv("FORCE_COLOR", "1")
    painted = call("first", "second", "-m", "loss").stdout
    assert "\x1b[36m" in painted and "\x1b[33m" in painted
    assert any("\u2800" <= sign <= "\u28ff" for sign in painted)


def test_one_curve_is_drawn_in_braille_also_in_a_pipe_and_in_ascii_if_asked(runs: Path) -> None:
    trained(runs / "mine")
    assert any("\u2800" <= sign <= "\u28ff" for sign in call("-m", "lr").stdout)
    assert call("-m", "lr", "--ascii").stdout.isascii()


def test_numbers_that_a_script_only_printed_are_drawn_alike(runs: Path) -> None:
    run = make_run(runs / "printed")
    log(run, [{"step": k, "at_s": START_S + k, "loss": 1 / k} for k in range(1, 50)], run.printed_metrics)
    assert "loss  last 0.020, 0.020 to 1.000, lowest at step 49" in call("printed").stdout


def test_steps_that_were_trained_again_are_drawn_once(runs: Path) -> None:
    run = make_run(runs / "mine")
    log(run, [{"step": k, "at_s": START_S + k, "loss": 1.0} for k in range(1, 50)])
    log(run, [{"step": k, "at_s": START_S + 90 + k, "loss": 2.0} for k in range(20, 60)])
    (curve,) = json.loads(call("-m", "loss", "--json").stdout)["panels"][0]["curves"]
    assert [x for x, _ in curve["points"]] == list(range(1, 60))
    assert [y for _, y in curve["points"]] == [1.0] * 19 + [2.0] * 40


def test_json_is_bounded_and_has_no_nan(runs: Path) -> None:
    run = make_run(runs / "mine")
    log(run, [{"step": k, "at_s": START_S + k, "loss": "nan" if k == 5000 else 0.5} for k in range(1, 5001)])
    found = json.loads(call("--json", "-m", "loss", "--points", "50").stdout)
    assert (found["schema"], found["x"], found["runs"]) == (
        "jackline.plot/1",
        "step",
        [{"name": "mine", "path": str(run.path)}],
    )
    (curve,) = found["panels"][0]["curves"]
    assert (curve["num_points"], curve["points"][-1]) == (5000, [5000.0, None])
    assert len(curve["points"]) <= 50
    assert "1 not finite" in call("-m", "loss").stdout


def test_json_keeps_a_spike_of_one_step(runs: Path) -> None:
    run = make_run(runs / "mine")
    log(run, [{"step": k, "at_s": START_S + k, "loss": 90.0 if k == 2346 else 0.5} for k in range(1, 5001)])
    (curve,) = json.loads(call("--json", "-m", "loss", "--points", "50").stdout)["panels"][0]["curves"]
    assert [2346.0, 90.0] in curve["points"]


def test_a_metric_that_does_not_exist_names_the_nearest(runs: Path) -> None:
    trained(runs / "mine")
    assert refused("-m", "los") == (
        "error: there is no metric 'los' in 'mine'\nhint: did you mean 'loss'? `jackline plot --list` prints all"
    )
    assert "\nhint: it has loss, lr, val_loss" in refused("-m", "zzz")


def test_a_run_without_numbers_says_how_to_have_some(runs: Path) -> None:
    make_run(runs / "new")
    assert refused("new") == (
        "error: there is nothing to draw yet: 'new' has no numbers\n"
        "hint: log one: run.log(loss=loss), or print it: loss 2.31"
    )


def test_over_time_and_by_pattern(runs: Path) -> None:
    trained(runs / "mine")
    lines = call("-m", "*loss", "-x", "time").stdout.splitlines()
    assert lines[-1].split() == ["0.0s", "time", "50s"]
    assert [line.split()[1] for line in lines if "last " in line] == ["loss", "val_loss"]


def test_a_million_lines_are_read_in_parts(runs: Path) -> None:
    """Evenly spread from the first to the last, within a fixed amount of work."""
    run = make_run(runs / "long")
    with open(run.metrics(), "w") as file:
        for step in range(200_000):
            file.write(f'{{"step":{step},"at_s":{START_S + step},"loss":{1 - step / 200_000},"lr":0.001}}\n')
    (curve,) = json.loads(call("-m", "loss", "--json").stdout)["panels"][0]["curves"]
    assert curve["num_points"] < 60_000
    steps = [x for x, _ in curve["points"]]
    assert steps[0] == 0 and steps[-1] == 199_999
    assert max(after - before for before, after in itertools.pairwise(steps)) < 10_000


def test_values_that_are_not_finite_leave_a_gap() -> None:
    curve = Curve("x", ((0.0, 1.0), (1.0, math.nan), (2.0, math.inf), (3.0, 2.0)))
    assert frame_of([curve]) == Frame(0.0, 3.0, 1.0, 2.0)
    assert frame_of([Curve("x", ((0.0, math.nan),))]) is None
    assert len(draw([curve], Frame(0, 3, 1, 2), Style(40, 4))) == 4


def test_a_constant_curve_and_a_logarithm_are_drawn() -> None:
    flat = Curve("x", ((0.0, 3.0), (1.0, 3.0)))
    frame = frame_of([flat])
    assert frame is not None and frame.bottom < 3.0 < frame.top
    curve = Curve("x", tuple((float(k), 10.0**-k) for k in range(5)))
    found = frame_of([curve], is_log=True)
    assert found is not None
    rows = draw([curve], found, Style(40, 9, use_braille=False, is_log=True))
    assert [row.index("*") for row in rows if "*" in row] == sorted(row.index("*") for row in rows if "*" in row)
    assert rows[4].split()[0] == "0.010"  # the middle of 1 and 0.0001

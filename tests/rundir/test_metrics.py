"""metrics-printed.jsonl: what was written is read back, and both files are one set of series."""

from __future__ import annotations

import json
import math
from pathlib import Path

from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import MetricsLine, Point, PrintedMetrics, read_series


def test_printed_metrics_are_read_back_by_name(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    writer = PrintedMetrics(run)
    assert not run.printed_metrics.exists(), "a command that prints no metrics gets no file"
    assert writer.append(MetricsLine({"loss": 2.5, "lr": 1e-4}, step=10, at_s=1.8e9, epoch=1))
    assert writer.append(MetricsLine({"loss": float("nan")}, step=20, at_s=1.8e9 + 1))
    writer.close()
    loss, lr = read_series(run)
    assert (loss.name, lr.name) == ("loss", "lr")
    assert loss.points[0] == Point(2.5, 10, 1.8e9, 1)
    assert math.isnan(loss.points[1].value)
    assert not loss.is_guessed
    assert loss.source == "printed"


def test_where_the_step_goes_back_the_later_lines_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    writer = PrintedMetrics(run)
    for step, loss in ((10, 3.0), (20, 2.0), (30, 1.0), (20, 2.1), (30, 1.1)):
        writer.append(MetricsLine({"loss": loss}, step=step, at_s=1.8e9))
    (series,) = read_series(run)
    assert [(point.step, point.value) for point in series.points] == [(10, 3.0), (20, 2.1), (30, 1.1)]


def test_what_the_session_logged_comes_before_what_was_printed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    PrintedMetrics(run).append(MetricsLine({"loss": 9.0, "acc": 0.5}, step=1, at_s=1.8e9))
    run.metrics(0).write_text(json.dumps({"step": 1, "at_s": 1.8e9, "loss": 2.0}) + "\n")
    found = {series.name: series for series in read_series(run)}
    assert found["loss"].source == "session"
    assert found["loss"].points[0].value == 2.0
    assert found["acc"].source == "printed"


def test_a_learned_format_is_marked_and_damage_is_passed_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    PrintedMetrics(run).append(MetricsLine({"energy": -3.0}, at_s=1.8e9, is_guessed=True))
    with open(run.printed_metrics, "a") as file:
        file.write('not json\n{"step": [1], "at_s": "x", "energy": true, "other": 1e400}\n{"torn')
    (series,) = read_series(run)
    assert series.is_guessed
    assert series.points == (Point(-3.0, None, 1.8e9),)

"""Curves: thin without losing a spike, read on from where the last look ended, right after a resume."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.dashboard import curves
from jackline.dashboard.curves import BUCKETS, Curve, RunCurves, parse_rows, read_samples, sparkline
from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import read_series
from tests.dashboard.conftest import write_metrics


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def read(store: RunCurves, cursor: str = "") -> dict[str, Any]:
    """Everything, however many looks it takes."""
    while True:
        store.advance(60.0)
        found = store.to_json(cursor)
        if found["is_whole"]:
            return found


def curve(found: dict[str, Any], name: str = "loss") -> dict[str, Any]:
    return next(entry for entry in found["curves"] if entry["name"] == name)


def test_a_short_curve_is_sent_as_it_is(run: RunDir) -> None:
    write_metrics(run, [{"step": step, "at_s": 100.0 + step, "loss": 1 / step} for step in range(1, 50)])
    found = curve(read(RunCurves(run)))
    assert found["steps"] == list(range(1, 50)) and found["per"] == 1 and "low" not in found
    assert found["last"][:2] == [1.0, 0.5] and found["times"][0] == 101.0


def test_a_long_curve_keeps_every_spike(run: RunDir) -> None:
    rng = random.Random(1)
    rows = [{"step": step, "loss": rng.random()} for step in range(20_000)]
    rows[7777]["loss"], rows[12345]["loss"] = 99.0, -5.0
    write_metrics(run, rows)
    found = curve(read(RunCurves(run)))
    assert BUCKETS <= len(found["last"]) <= 2 * BUCKETS
    assert max(found["high"]) == 99.0 and min(found["low"]) == -5.0
    assert found["last"][-1] == pytest.approx(rows[-1]["loss"], rel=1e-4)


def test_a_second_look_reads_and_sends_only_what_is_new(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metrics(run, [{"step": step, "loss": 1.0} for step in range(100)])
    store = RunCurves(run)
    first = read(store)
    offsets = []
    original = curves.read_part
    monkeypatch.setattr(curves, "read_part", lambda *words: offsets.append(words[1]) or original(*words))
    unchanged = read(store, first["cursor"])
    assert unchanged["curves"] == [] and offsets == [] and not unchanged["is_new"]
    size = run.metrics().stat().st_size
    write_metrics(run, [{"step": step, "loss": 2.0} for step in range(100, 103)], more=True)
    second = read(store, first["cursor"])
    assert offsets == [size]
    assert curve(second)["from"] == 100 and curve(second)["last"] == [2.0, 2.0, 2.0]


def test_a_client_that_adds_what_is_new_has_the_whole_curve(run: RunDir) -> None:
    rng = random.Random(3)
    store, known, cursor, step = RunCurves(run), [], "", 0
    for _ in range(12):
        rows = []
        for _ in range(rng.randrange(0, 400)):
            step += 1
            rows.append({"step": step, "loss": rng.random()})
        if rng.random() < 0.3:
            step = max(0, step - rng.randrange(0, 300))  # a crash: the last steps come again
        write_metrics(run, rows, more=True)
        found = read(store, cursor)
        cursor = found["cursor"]
        for entry in found["curves"]:
            known = known[: entry["from"]] + list(zip(entry["steps"], entry["last"], strict=True))
    whole = curve(read(RunCurves(run)))
    assert known == list(zip(whole["steps"], whole["last"], strict=True))
    assert [one for one, _ in known] == sorted(one for one, _ in known)


def test_after_a_resume_the_new_points_count(run: RunDir) -> None:
    first = [{"step": step, "loss": 1.0} for step in range(10)]
    again = [{"step": step, "loss": 2.0} for step in range(6, 12)]
    write_metrics(run, first + again)
    found = curve(read(RunCurves(run)))
    (series,) = read_series(run)
    assert found["steps"] == [point.step for point in series.points] == list(range(12))
    assert found["last"] == [point.value for point in series.points]


def test_numbers_that_json_cannot_hold_are_gaps(run: RunDir) -> None:
    run.metrics().write_text(
        '{"step":1,"loss":"nan"}\n{"step":2,"loss":"inf"}\n{"step":3,"loss":NaN}\n{"step":4,"loss":1e999}\n'
        '{"step":5,"loss":1.5}\n{"step":6,"loss":true}\n{"step":7,"loss":[1]}\nnot json\n{"step":8,"loss":2}\n'
    )
    found = curve(read(RunCurves(run)))
    assert found["steps"] == [1, 2, 3, 4, 5, 8] and found["last"] == [None, None, None, None, 1.5, 2.0]
    json.dumps(found, allow_nan=False)


def test_a_line_that_is_still_being_written_is_left_for_later(run: RunDir) -> None:
    run.metrics().write_text('{"step":1,"loss":1.0}\n{"step":2,"lo')
    store = RunCurves(run)
    assert curve(read(store))["steps"] == [1]
    with open(run.metrics(), "a") as file:
        file.write('ss":2.0}\n')
    assert curve(read(store))["steps"] == [1, 2]


def test_a_long_file_is_shown_by_samples_until_it_is_read(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "SAMPLED_ABOVE_BYTES", 100_000)
    monkeypatch.setattr(curves, "PORTION_BYTES", 50_000)
    write_metrics(run, [{"step": step, "loss": float(step)} for step in range(40_000)])
    store, cursor, stages = RunCurves(run), "", []
    while not stages or stages[-1] != "whole":
        store.advance(0.0)
        found = store.to_json(cursor)
        cursor = found["cursor"]
        stages.append("whole" if found["is_whole"] else "samples")
        if stages == ["samples"]:
            assert curve(found)["steps"][0] == 0 and curve(found)["last"][-1] > 39_000  # from the first look on
        elif stages[-1] == "samples":
            assert found["curves"] == [] and found["read_share"] > 0  # sent once
    assert len(stages) > 3 and curve(found)["from"] == 0 and curve(found)["last"][-1] == 39_999.0


def test_what_the_session_logged_comes_before_what_was_printed(run: RunDir) -> None:
    write_metrics(run, [{"step": 1, "loss": 1.0}])
    run.printed_metrics.write_text('{"step":1,"loss":5.0,"acc":0.5,"is_guessed":true}\n')
    found = read(RunCurves(run))
    assert curve(found)["last"] == [1.0] and curve(found, "acc")["is_guessed"]


def test_a_file_that_was_replaced_is_read_from_its_beginning(run: RunDir) -> None:
    write_metrics(run, [{"step": step, "loss": 1.0} for step in range(100)])
    store = RunCurves(run)
    read(store)
    write_metrics(run, [{"step": 1, "loss": 7.0}])
    assert curve(read(store))["last"] == [7.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=2500), st.integers(1, 700))
def test_a_curve_holds_the_extremes_of_any_values(values: list[float], portion: int) -> None:
    found = Curve()
    for begin in range(0, len(values), portion):
        part = values[begin : begin + portion]
        found.add(list(range(begin, begin + len(part))), [None] * len(part), part, 1)
    finite = [value for value in values if math.isfinite(value)]
    assert max((one.high for one in found.buckets if one.high is not None), default=None) == max(finite, default=None)
    assert min((one.low for one in found.buckets if one.low is not None), default=None) == min(finite, default=None)
    assert sum(one.count for one in found.buckets) == len(values) and len(found.buckets) <= 2 * BUCKETS


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    assert all(isinstance(row, dict) for row in parse_rows(data))


def test_samples_of_a_short_file_are_all_of_it(run: RunDir) -> None:
    write_metrics(run, [{"step": step, "loss": 1.0} for step in range(30)])
    assert len(read_samples(run.metrics())) == 30


def test_a_sparkline_is_spread_over_the_steps_and_ends_at_the_last_value() -> None:
    rows: list[dict[str, Any]] = [{"step": step, "val": 9.0, "loss": float(step)} for step in [*range(900), 10_000]]
    name, values = sparkline(rows, ("loss",), 11)
    assert name == "loss" and values == [0.0, 899.0, 10_000.0]
    assert sparkline([], ("loss",)) == ("", []) and sparkline([{"step": 1, "x": 1}], ("loss",)) == ("", [])

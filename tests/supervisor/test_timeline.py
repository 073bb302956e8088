"""timeline.jsonl: a line at each change, and from time to time in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jackline.rundir.layout import RunDir
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.records.supervisor import NowRecord, ProgressRecord, SupervisorRecord, VerdictRecord
from jackline.rundir.records.timeline import TimelineRecord, read_timeline
from jackline.supervisor.timeline import Timeline, is_due, make_line

BEGIN = 1_794_000_000.0
STATE = SupervisorRecord(
    at_s=BEGIN, attempt=1, verdict=VerdictRecord(kind="PROGRESS"), now=NowRecord("importing torch")
)


def test_a_line_is_due_at_a_change_and_after_a_while_without_one() -> None:
    line = TimelineRecord(at_s=BEGIN, attempt=1, verdict="PROGRESS", phase="train")
    assert is_due(None, line, age_s=0)
    assert not is_due(line, replace(line, at_s=BEGIN + 9), age_s=9)
    assert is_due(line, replace(line, at_s=BEGIN + 10), age_s=10)
    assert is_due(line, replace(line, at_s=BEGIN + 1, phase="validate"), age_s=1)
    assert is_due(line, replace(line, at_s=BEGIN + 1, verdict="STUCK"), age_s=1)
    assert not is_due(line, replace(line, at_s=BEGIN + 1, what="loading data"), age_s=1)
    assert not is_due(line, replace(line, at_s=BEGIN + 59), age_s=7200)
    assert not is_due(line, replace(line, at_s=BEGIN + 2, phase="validate"), age_s=7200)


def test_the_session_tells_more_than_output_and_stacks() -> None:
    progress = ProgressRecord("tqdm", done=7, total=9)
    seen = make_line(replace(STATE, progress=progress), SessionRecord())
    assert (seen.phase, seen.step, seen.total, seen.what) == ("tqdm", 7, 9, "importing torch")
    for aside in (
        ProgressRecord("data: training data", done=4205600, total=9e6, unit="bytes"),
        ProgressRecord("Loading checkpoint shards", done=2, total=3, unit="it"),
        ProgressRecord("", done=40, total=100, unit="%"),
    ):
        assert make_line(replace(STATE, progress=aside), SessionRecord()).step is None  # of the training
    epoch = ProgressRecord("Epoch 2", done=7, total=9, unit="it", of="epoch")
    seen = make_line(replace(STATE, progress=epoch), SessionRecord())
    assert (seen.step, seen.run_step, seen.is_part) == (7, None, True)
    session = SessionRecord(attempt=1, phase="train", step=3, total=400, spent_s={"fetch": 1.5, "forward": 2.0})
    seen = make_line(replace(STATE, progress=progress), session)
    assert (seen.phase, seen.step, seen.total, seen.spent_s) == ("train", 3, 400, {"fetch": 1.5})
    assert make_line(STATE, replace(session, attempt=2)).phase is None  # left by another attempt


def test_lines_are_read_back_and_damaged_ones_left_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    timeline = Timeline(run)
    timeline.note(STATE)
    timeline.note(replace(STATE, at_s=BEGIN + 1))
    timeline.note(replace(STATE, at_s=BEGIN + 2), is_last=True)
    with open(run.timeline, "a") as file:
        file.write('{"at_s": "x", "attempt": 1}\n[1]\n{"at_s": 5')
    assert [(line.at_s, line.is_last) for line in read_timeline(run)] == [(BEGIN, None), (BEGIN + 2, True)]


def test_a_folder_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    Timeline(RunDir(tmp_path / "gone")).note(STATE, is_last=True)

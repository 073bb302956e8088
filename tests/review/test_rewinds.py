"""Going back and leaving batches out, by a person or by `on_spike`, as the report and `diff` show it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jackline.checkpoint.format.catalogue import write_rewind
from jackline.checkpoint.format.manifest import Rewind
from jackline.cli.pages.diff import command as diff
from jackline.review.document import to_markdown
from jackline.review.facts import read_facts
from jackline.review.report import make_report
from jackline.review.rewinds import WentBack, read_rewinds, rewind_lines
from jackline.review.summary import summarise
from jackline.rundir.layout import RunDir
from jackline.rundir.records.seen import Skip, add_skip
from tests.review.test_compare import make_run

SPIKE = "loss 1e+04 at step 31, usually 2.97"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each reading of the clock is a second after the one before."""
    now_s = [1_794_000_000.0]

    def tick() -> float:
        now_s[0] += 1.0
        return now_s[0]

    monkeypatch.setattr(time, "time", tick)
    return now_s


def go_back(run: RunDir, step: int, retry: int, *left: str) -> None:
    """As `checkpoint.rewind` leaves it."""
    run.checkpoints.mkdir(exist_ok=True)
    body: dict[str, Any] = {"to": f"step-{step:08d}", "left_behind": list(left), "here": [], "at_s": time.time()}
    write_rewind(run.checkpoints, Rewind(step, retry), body)


def test_each_decision_is_told_once_with_who_made_it_and_what_it_left_behind(
    tmp_path: Path, clock: list[float]
) -> None:
    run = make_run(tmp_path, "a")
    assert read_rewinds(run) == ()
    go_back(run, 25, 1, "step-00000030")
    add_skip(run, Skip(25, 31, why=SPIKE), "step-00000025")
    clock[0] += 3600.0
    go_back(run, 40, 2, "step-00000045", "step-00000050")  # `resume --step 40`
    clock[0] += 3600.0
    go_back(run, 40, 3, "step-00000045-r2")
    add_skip(run, Skip(42, 43), "40")  # `resume --step 40 --skip-batches 42:43`
    clock[0] += 3600.0
    add_skip(run, Skip(70, 72), None)  # `resume --skip-batches 70:72`
    assert [replace_time(one) for one in read_rewinds(run)] == [
        WentBack(None, 25, ("step-00000030",), "25:31", SPIKE),
        WentBack(None, 40, ("step-00000045", "step-00000050")),
        WentBack(None, 40, ("step-00000045-r2",), "42:43"),
        WentBack(None, None, (), "70:72"),
    ]
    assert rewind_lines(read_rewinds(run), 3) == [
        f"  went back to step 25, without the batches 25:31 (on_spike: {SPIKE})",
        "  went back to step 40 (by hand)",
        "  went back to step 40, without the batches 42:43 (by hand)",
        "  on_spike=rewind has gone back 1 of at most 3 times",
    ]


def replace_time(one: WentBack) -> WentBack:
    return WentBack(None, one.to_step, one.left_behind, one.batches, one.why)


def test_diff_and_report_tell_of_a_rewind_also_where_the_other_run_recorded_nothing(
    tmp_path: Path, clock: list[float]
) -> None:
    plain, changed = make_run(tmp_path, "plain"), make_run(tmp_path, "changed")
    assert read_facts(plain)["rewinds"] == {}
    go_back(changed, 25, 1, "step-00000030")
    add_skip(changed, Skip(25, 31, why=SPIKE), "step-00000025")
    told = CliRunner().invoke(diff, ["plain", "changed", "--runs-dir", str(tmp_path)]).output
    assert "  rewinds\n    batches left out: (absent) -> 25:31\n" in told, told
    assert f"    went back to step 25: (absent) -> on_spike: {SPIKE}\n" in told, told
    assert "rewinds" not in CliRunner().invoke(diff, ["plain", "plain", "--runs-dir", str(tmp_path)]).output
    text = to_markdown(make_report(summarise(changed, now_s=clock[0])))
    assert "## Rewinds" in text and "## Rewinds" not in to_markdown(make_report(summarise(plain, now_s=clock[0])))
    assert f"| step 25 | 25:31 | on\\_spike: {SPIKE} | step-00000030 |" in text, text
    assert "It went back once" in text


def test_the_second_time_to_one_step_has_a_name_of_its_own(tmp_path: Path, clock: list[float]) -> None:
    run = make_run(tmp_path, "a")
    for retry in (1, 2):
        go_back(run, 40, retry, "step-00000045")
        clock[0] += 3600.0
    assert read_facts(run)["rewinds"] == {"went back to step 40": "by hand", "went back to step 40 (2)": "by hand"}


@pytest.mark.parametrize("damage", ["", "[1]", "{", "null", '{"at_s": "x", "left_behind": 5}'])
def test_a_damaged_file_still_counts_by_its_name(damage: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / str(Rewind(25, 1))).write_text(damage)
    run.skipped_file.write_text(damage)
    assert read_rewinds(run) == (WentBack(None, 25),)
    shutil.rmtree(run.path)

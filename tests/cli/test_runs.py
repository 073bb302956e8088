"""`jackline runs`: all runs that can be found from here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jackline.cli.commands.runs import command
from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock
from jackline.rundir.registry import register
from tests.rundir.made import (
    foreign_process,
    gone_process,
    make_run,
    this_process,
    write_exit,
    write_start,
    write_state,
)

NOW_S = 1_794_000_000.0


@pytest.fixture
def runs(clean_environment: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("jackline.cli.view.run_view.wall_clock_s", lambda: NOW_S)
    monkeypatch.chdir(clean_environment.parent)
    return clean_environment


def call(*words: str) -> Result:
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.exception
    return result


def rows(*words: str) -> list[list[str]]:
    """Cells are two or more spaces apart."""
    lines = call(*words).stdout.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def changed(run: RunDir, at_s: float) -> None:
    for path in (run.supervisor_file, run.run_file):
        if path.exists():
            os.utime(path, (at_s, at_s))


def made(folder: Path, at_s: float, age_s: float = 60.0) -> RunDir:
    run = make_run(folder, created_at_s=NOW_S - age_s)
    changed(run, at_s)
    return run


def test_runs_are_listed_newest_first_with_state_progress_age_and_path(runs: Path) -> None:
    alive = made(runs / "alive", 0)
    write_start(alive, this_process())
    write_state(alive, this_process(), at_s=NOW_S, progress={"done": 1200, "total": 5000})
    changed(alive, 5000)
    dead = made(runs / "dead", 0, age_s=7200)
    write_exit(dead, 137, number=2, cause="kernel_oom")
    changed(dead, 4000)
    finished = made(runs.parent / "other" / "finished", 0)
    write_exit(finished, 0)
    changed(finished, 3000)
    register(finished, vouched=True)
    lost = made(runs / "lost", 0)
    write_start(lost, gone_process())
    changed(lost, 2000)
    away = made(runs / "away", 0)
    write_start(away, foreign_process())
    changed(away, 1000)
    made(runs / "new", 500)
    assert rows() == [
        ["NAME", "STATE", "ATTEMPT", "PROGRESS", "AGE", "PATH"],
        ["alive", "alive", "1", "1,200/5,000 (24 %)", "1 min", "runs/alive"],
        ["dead", "killed (kernel oom)", "2", "-", "2 h", "runs/dead"],
        ["finished", "finished", "1", "-", "1 min", "other/finished"],
        ["lost", "gone (end not seen)", "1", "-", "1 min", "runs/lost"],
        ["away", "elsewhere", "1", "-", "1 min", "runs/away"],
        ["new", "empty", "-", "-", "1 min", "runs/new"],
    ]


def test_restarting_stale_and_damaged_runs_are_told_apart(runs: Path) -> None:
    restarting, stale, damaged = (made(runs / name, 0) for name in ("restarting", "stale", "damaged"))
    write_state(restarting, this_process(), at_s=NOW_S, is_restarting=True)
    write_state(stale, this_process(), at_s=NOW_S - 60)
    damaged.run_file.write_text("{")
    for at_s, run in ((3000, restarting), (2000, stale), (1000, damaged)):
        changed(run, at_s)
    assert [row[:2] for row in rows()[1:]] == [
        ["restarting", "restarting"],
        ["stale", "alive, stale"],
        ["damaged", "empty, damaged"],
    ]


def test_a_live_run_that_does_not_move_is_marked_by_its_verdict(runs: Path) -> None:
    verdicts = {
        "stuck": {"kind": "STUCK", "label": "STUCK_CHILD", "for_s": 720.0},
        "suspect": {"kind": "SUSPECT", "label": "SLEEPING"},
        "busy": {"kind": "BUSY", "label": "BUSY", "for_s": 720.0},
        "moving": {"kind": "PROGRESS", "label": "TRAINING", "for_s": 1.0},
        "odd": {"kind": ["STUCK"]},
        "strange": "STUCK",
    }
    for number, (name, verdict) in enumerate(verdicts.items()):
        run = made(runs / name, 0)
        write_state(run, this_process(), at_s=NOW_S, verdict=verdict)
        changed(run, 9000 - number)
    old = made(runs / "old", 0)
    write_state(old, this_process(), at_s=NOW_S - 60, verdict=verdicts["stuck"])  # was true once
    changed(old, 2000)
    gone = made(runs / "gone", 0)
    write_state(gone, gone_process(), at_s=NOW_S, verdict=verdicts["stuck"])
    write_exit(gone, 137, cause="killed")
    changed(gone, 1000)
    assert [row[:2] for row in rows()[1:]] == [
        ["stuck", "alive, STUCK for 12 min"],
        ["suspect", "alive, SUSPECT"],
        ["busy", "alive"],
        ["moving", "alive"],
        ["odd", "alive"],
        ["strange", "alive"],
        ["old", "alive, stale"],
        ["gone", "crashed (killed)"],
    ]
    assert rows("--logs")[1][:2] == ["stuck", "alive, STUCK for 12 min"]


def test_logs_are_listed_with_size_age_and_verdict(runs: Path) -> None:
    growing, silent, empty, warnings = (made(runs / name, 0) for name in ("growing", "silent", "empty", "warnings"))
    for run, silent_s in ((growing, 3.0), (silent, 300), (empty, 720.0), (warnings, 720.0)):
        write_start(run, this_process())
        write_state(run, this_process(), at_s=NOW_S, silent_s=silent_s, started_at_s=NOW_S - 720)
        run.out_log.write_text("2026-11-15T02:18:34Z step 1\n")
    empty.out_log.write_text("")
    warnings.out_log.write_text("2026-11-15T02:18:34Z UserWarning: x\n")
    for at_s, run in ((4000, growing), (3000, silent), (2000, empty), (1000, warnings)):
        changed(run, at_s)
    assert rows("--logs") == [
        ["NAME", "STATE", "SIZE", "LAST OUTPUT", "VERDICT", "LOG"],
        ["growing", "alive", "28 B", "3.0 s ago", "growing, last line 3.0 s ago", "runs/growing/out.log"],
        ["silent", "alive", "28 B", "5 min ago", "silent for 5 min", "runs/silent/out.log"],
        [
            "empty",
            "alive",
            "0 B",
            "-",
            "empty after 12 min; programs that are not Python may keep their output back off a terminal (--tty)",
            "runs/empty/out.log",
        ],
        ["warnings", "alive", "36 B", "12 min ago", "nothing but warnings so far (1 line)", "runs/warnings/out.log"],
    ]


def test_only_the_newest_twenty_are_shown_unless_all_are_asked_for(runs: Path) -> None:
    for number in range(23):
        made(runs / f"run-{number}", 1000 + number)
    result = call()
    assert len(result.stdout.splitlines()) == 1 + 20
    assert result.stderr == "3 older ones are not shown: jackline runs --all\n"
    assert len(call("--all").stdout.splitlines()) == 1 + 23


def test_json_is_a_list_newest_first(runs: Path) -> None:
    made(runs / "old", 1000)
    made(runs / "new", 2000)
    assert [entry["name"] for entry in json.loads(call("--json").stdout)] == ["new", "old"]


def test_no_run_at_all_tells_how_to_start_one(runs: Path) -> None:
    result = call()
    assert (result.stdout, result.stderr) == (
        "",
        f"there is no run in {runs}\nhint: start one: jackline run -- python train.py\n",
    )
    assert json.loads(call("--json").stdout) == []


def test_a_name_with_escape_sequences_is_shown_without_them(runs: Path) -> None:
    made(runs / "a\x1b[31mb\u202e", 1000)
    assert rows()[1][0] == "ab"
    assert rows()[1][-1] == "runs/ab"


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_at_eighty_columns_a_run_is_one_row_and_what_matters_least_is_left_out(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(runs / ("a-very-long-script-name-of-a-person-" + "x" * 30 + "-0123ab"), 0)
    write_start(run, this_process())
    verdict = {"kind": "SUSPECT", "label": "SLEEPING", "for_s": 725.0}
    progress = {"done": 1_234_567, "total": 9_999_999}
    write_state(run, this_process(), at_s=NOW_S, progress=progress, verdict=verdict)
    monkeypatch.setattr("jackline.cli.text.paint._is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    narrow = call().stdout
    assert widest(narrow) <= 80
    assert len(narrow.splitlines()) == 2
    assert narrow.splitlines()[0].split() == ["NAME", "STATE", "PROGRESS", "AGE"]
    assert "1,234,567/9,999,999 (12 %)" in narrow
    monkeypatch.setenv("COLUMNS", "400")
    assert rows()[0] == ["NAME", "STATE", "ATTEMPT", "PROGRESS", "AGE", "PATH"]


def test_a_state_has_a_colour_only_where_colours_are_wanted(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_exit(made(runs / "dead", 0), 1, cause="own_exception")
    assert "\x1b" not in call().stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[31mcrashed (own exception)\x1b[0m" in call().stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in call().stdout


# -- deleting --------------------------------------------------------------------------------------------------------


def ended(folder: Path, days: float, code: int = 1) -> RunDir:
    run = made(folder, 0, age_s=days * 86400)
    write_exit(run, code, ended_at_s=NOW_S - days * 86400)
    return run


def refused(*words: str) -> str:
    result = CliRunner().invoke(command, words)
    assert result.exit_code != 0
    return str(result.exception)


def test_rm_deletes_the_named_runs_and_nothing_else(runs: Path) -> None:
    for name in ("one-aaaaaa", "two-bbbbbb", "three-cccccc"):
        ended(runs / name, days=1)
    result = call("rm", "one", "three-cccccc", "--yes", "--json")
    assert [entry["name"] for entry in json.loads(result.stdout)["deleted"]] == ["one-aaaaaa", "three-cccccc"]
    assert [path.name for path in runs.iterdir()] == ["two-bbbbbb"]


def test_rm_asks_and_deletes_nothing_where_nobody_can_answer(runs: Path) -> None:
    ended(runs / "mine", days=1)
    text = refused("rm", "mine")
    assert text.startswith("error: deleting runs needs --yes where nobody can be asked\n       mine  failed, ")
    assert (runs / "mine").is_dir()


def test_a_live_run_is_not_deleted(runs: Path) -> None:
    write_start(made(runs / "live", 0), this_process())
    assert refused("rm", "live", "--yes") == ("error: run 'live' is alive\nhint: end it first: jackline stop live")
    assert (runs / "live").is_dir()


def test_a_run_of_another_machine_is_deleted_only_by_force(runs: Path) -> None:
    write_start(made(runs / "away", 0), foreign_process())
    assert "was last seen on another machine" in refused("rm", "away", "--yes")
    call("rm", "away", "--yes", "--force")
    assert not (runs / "away").exists()


def test_a_run_whose_checkpoints_are_being_written_is_not_deleted(runs: Path) -> None:
    run = ended(runs / "writing", days=1)
    run.checkpoints.mkdir()
    lock = RunLock(run.checkpoints / "writer.lock")
    assert lock.try_acquire()
    result = CliRunner().invoke(command, ["rm", "writing", "--yes"])
    assert result.exit_code == 1
    assert "run 'writing' is in use: a process still writes its checkpoints" in result.stderr
    assert run.has_run_file
    lock.release()
    call("rm", "writing", "--yes")
    assert not run.path.exists()


def test_prune_deletes_what_ended_longer_ago_and_only_in_this_folder(runs: Path) -> None:
    ended(runs / "old", days=31)
    ended(runs / "old-and-done", days=40, code=0)
    ended(runs / "young", days=29)
    register(ended(runs.parent / "other" / "elsewhere", days=90), vouched=True)
    write_start(made(runs / "live", 0, age_s=90 * 86400), this_process())
    assert "would delete old  failed, " in call("prune", "--older", "30d", "--dry-run").stdout
    assert (runs / "old").is_dir()
    call("prune", "--older", "30d", "--dead", "--yes")
    assert sorted(path.name for path in runs.iterdir()) == ["live", "old-and-done", "young"]
    call("prune", "--older", "30d", "--yes")
    assert sorted(path.name for path in runs.iterdir()) == ["live", "young"]
    assert (runs.parent / "other" / "elsewhere").is_dir()
    nothing = f"nothing to delete: no ended run in {runs} is older than 30 d\n"
    assert call("prune", "--older", "30d").stdout == nothing

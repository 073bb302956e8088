"""Which run a command means when its spelling, its folder or its arguments have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jackline.rundir.command import plain_settings
from jackline.rundir.kin import find_same, kin_lines, relocate
from jackline.rundir.layout import RunDir
from jackline.rundir.run_file import read_run_file
from tests.rundir.made import make_run, write_exit


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "x.py").touch()
    return folder


def settings_of(folder: Path, *argv: str) -> dict[str, Any]:
    return {"argv": list(argv), "cwd": str(folder)}


def made(work: Path, name: str, *argv: str, cwd: Path | None = None) -> RunDir:
    settings = settings_of(cwd or work, *argv)
    return make_run(work / "runs" / name, argv=argv, cwd=str(cwd or work), settings=settings)


def test_a_run_of_an_older_version_is_found_under_another_spelling(work: Path) -> None:
    old = made(work, "x-old", "/usr/bin/python3", "-u", "./x.py", "--lr", "1")
    wanted = plain_settings(settings_of(work, "python", "x.py", "--lr", "1"))
    assert find_same(work / "runs", "x-new", wanted).run == old


def test_other_arguments_are_another_run(work: Path) -> None:
    made(work, "x-old", "python", "x.py", "--lr", "1")
    wanted = plain_settings(settings_of(work, "python", "x.py", "--lr", "2"))
    assert find_same(work / "runs", "x-new", wanted).run == RunDir(work / "runs" / "x-new")


def test_a_run_whose_folder_was_renamed_is_the_same_run(work: Path) -> None:
    made(work, "x-old", "python", "x.py", "--lr", "1")
    moved = work.rename(work.with_name("renamed"))
    wanted = plain_settings(settings_of(moved, "python3", "-u", "x.py", "--lr", "1"))
    same = find_same(moved / "runs", "x-new", wanted)
    assert (same.run.name, same.moved_from) == ("x-old", str(work))
    relocate(same.run, ["python", "x.py", "--lr", "1"], wanted)
    contents = read_run_file(same.run)
    assert (contents.cwd, contents.settings) == (str(moved), wanted)
    assert contents.former[0]["settings"]["cwd"] == str(work)
    assert find_same(moved / "runs", "x-new", wanted).moved_from is None


def test_a_copied_folder_is_another_training(work: Path) -> None:
    made(work, "x-old", "python", "x.py")
    (work / "runs").rename(work.with_name("copied-runs"))
    copy = work.with_name("copy")
    copy.mkdir()
    work.with_name("copied-runs").rename(copy / "runs")
    wanted = plain_settings(settings_of(copy, "python", "x.py"))
    assert find_same(copy / "runs", "x-new", wanted).run.name == "x-new"
    assert kin_lines(copy / "runs", "x-new", wanted, lambda name: f"TRY {name}")[:2] == [
        "'x-new' is a new run. Other runs of x.py:",
        f"  'x-old' (no arguments in {work}), empty: jackline resume x-old",
    ]


def test_a_new_run_names_the_others_of_its_script_and_how_to_continue_them(work: Path) -> None:
    for number in range(5):
        write_exit(made(work, f"x-{number}", "python", "x.py", "--lr", str(number)), 0 if number == 4 else 1)
    write_exit(made(work, "y", "python", "y.py", "--lr", "3"), 1)
    wanted = plain_settings(settings_of(work, "python", "x.py", "--lr", "9"))
    lines = kin_lines(work / "runs", "x-new", wanted, lambda name: f"TRY {name}")
    assert lines[0] == "'x-new' is a new run. Other runs of x.py:"
    assert len(lines) == 6
    assert all("jackline resume x-" in line or "finished" in line for line in lines[1:4])
    assert lines[4] == "  and 2 more: jackline runs"
    assert lines[5].startswith("to continue one with the settings of this start: TRY x-")
    assert kin_lines(work / "runs", "z", plain_settings(settings_of(work, "python", "z.py")), str) == []


def test_a_recipe_with_more_steps_names_the_run_with_fewer(work: Path) -> None:
    settings = {"recipe": "demo", "max_steps": 100, "lr": 0.1, "cwd": str(work)}
    write_exit(make_run(work / "runs" / "demo-1", settings=settings, cwd=str(work)), 0)
    lines = kin_lines(work / "runs", "demo-2", {**settings, "max_steps": 200}, lambda name: f"TRY {name}")
    assert lines == [
        "'demo-2' is a new run. Other runs of demo:",
        "  'demo-1' (max_steps 100, now 200), finished",
        "to continue one with the settings of this start: TRY demo-1",
    ]


def test_a_damaged_run_is_no_kin(work: Path) -> None:
    run = made(work, "x-old", "python", "x.py")
    run.run_file.write_text("{")
    wanted = plain_settings(settings_of(work, "python", "x.py"))
    assert find_same(work / "runs", "x-new", wanted).run.name == "x-new"
    assert kin_lines(work / "runs", "x-new", wanted, str) == []

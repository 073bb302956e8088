"""From the word a person typed to a run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.rundir.find import find_only_live, find_run, list_runs, runs_folder
from jackline.rundir.layout import RunDir
from jackline.rundir.registry import register
from tests.rundir.made import gone_process, make_run, this_process, write_start, write_state


def at(run: RunDir, changed_s: float) -> RunDir:
    for path in (run.supervisor_file, run.run_file):
        if path.exists():
            os.utime(path, (changed_s, changed_s))
    return run


def live(folder: Path) -> RunDir:
    run = make_run(folder)
    write_state(run, this_process())
    write_start(run, this_process())
    return run


def problem(call: object, *arguments: object) -> str:
    with pytest.raises(UsageError) as caught:
        call(*arguments)  # type: ignore[operator]
    return str(caught.value)


def test_the_runs_folder_is_the_option_then_the_environment_then_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JACKLINE_RUNS", "/from/env")
    assert runs_folder("given") == tmp_path / "given"
    assert runs_folder() == Path("/from/env")
    monkeypatch.delenv("JACKLINE_RUNS")
    assert runs_folder() == tmp_path / "runs"


def test_runs_of_the_folder_and_of_the_registry_are_listed_once_newest_first(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    old, new = at(make_run(folder / "old"), 1000), at(make_run(folder / "new"), 3000)
    elsewhere = at(make_run(tmp_path / "other" / "middle"), 2000)
    for run in (old, new, elsewhere):
        register(run, vouched=True)
    (folder / "not-a-run").mkdir()
    (folder / "file").touch()
    assert [run.name for run in list_runs(folder)] == ["new", "middle", "old"]


def test_a_folder_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nothing") == []


def test_a_run_is_found_by_name_path_or_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"
    inside, outside = make_run(folder / "inside"), make_run(tmp_path / "far" / "outside")
    register(outside, vouched=True)
    monkeypatch.chdir(tmp_path / "far")
    assert find_run("inside", folder) == inside
    assert find_run(str(outside.path), folder) == outside
    assert find_run("./outside", folder).path.resolve() == outside.path
    monkeypatch.chdir(tmp_path)
    assert find_run("outside", folder) == outside


def test_a_run_that_lost_its_run_json_is_still_found_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "torn")
    write_start(run, gone_process())
    run.run_file.unlink()
    assert find_run("torn", tmp_path / "runs") == run


def test_without_a_word_the_only_live_run_is_meant(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    alive = live(folder / "alive")
    at(make_run(folder / "newest"), 4_000_000_000)
    assert find_run(None, folder) == alive


def test_without_a_word_and_with_two_live_runs_the_newest_is_meant(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    at(live(folder / "one"), 1000)
    newest = at(live(folder / "two"), 2000)
    assert find_run(None, folder) == newest


def test_without_any_run_the_way_to_start_one_is_told(tmp_path: Path) -> None:
    assert problem(find_run, None, tmp_path / "runs") == (
        f"error: there is no run in {tmp_path}/runs\nhint: start one: jackline run -- python train.py"
    )


def test_an_unknown_name_suggests_the_nearest(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "train-abc123")
    assert problem(find_run, "train-abc124", tmp_path / "runs") == (
        f"error: there is no run 'train-abc124' in {tmp_path}/runs\nhint: did you mean 'train-abc123'?"
    )
    assert problem(find_run, "zzz", tmp_path / "runs") == (
        f"error: there is no run 'zzz' in {tmp_path}/runs\nhint: `jackline runs` lists the runs that can be found"
    )


def test_a_word_too_long_for_a_path_is_just_unknown(tmp_path: Path) -> None:
    assert problem(find_run, "x" * 5000, tmp_path / "runs").startswith("error: there is no run 'xxx")


def test_stop_finds_the_only_live_run_and_refuses_to_guess(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    make_run(folder / "dead")
    assert problem(find_only_live, folder) == "error: no run is alive\nhint: `jackline runs` lists them all"
    one = at(live(folder / "one"), 1000)
    assert find_only_live(folder) == one
    at(live(folder / "two"), 2000)
    assert problem(find_only_live, folder) == ("error: 2 runs are alive: two, one\nhint: name one: jackline stop two")


def test_the_beginning_of_a_name_is_enough_where_only_one_run_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    crash = at(make_run(folder / "crash-239df1"), 1000)
    at(make_run(folder / "train-0a1b2c"), 2000)
    at(make_run(folder / "train-0a9999"), 3000)
    assert find_run("crash", folder) == crash
    assert find_run("train-0a1", folder).name == "train-0a1b2c"
    assert problem(find_run, "train", folder) == (
        "error: 2 runs begin with 'train'\n"
        "       train-0a9999 (empty)\n"
        "       train-0a1b2c (empty)\n"
        "hint: write more of the name: the newest is train-0a9999"
    )


def test_a_whole_name_goes_before_longer_ones_that_begin_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    mine = make_run(folder / "mine")
    make_run(folder / "mine-2")
    assert find_run("mine", folder) == mine


def test_a_run_of_this_folder_goes_before_one_of_another(tmp_path: Path, clean_environment: Path) -> None:
    here = make_run(tmp_path / "here" / "crash-111111")
    there = make_run(tmp_path / "there" / "crash-222222")
    register(here, vouched=True)
    register(there, vouched=True)
    assert find_run("crash", tmp_path / "here") == here
    assert find_run("crash", tmp_path / "there") == there


@pytest.mark.parametrize("word", ["crsah", "crash239df1", "239df1", "CRASH"])
def test_a_mistyped_name_is_compared_without_its_hash_too(word: str, tmp_path: Path) -> None:
    make_run(tmp_path / "crash-239df1")
    assert problem(find_run, word, tmp_path).endswith("hint: did you mean 'crash-239df1'?")

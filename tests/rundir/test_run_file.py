"""run.json: written once, read for ever."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from jackline.errors import UsageError
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import boot_id, host_name
from jackline.rundir.run_file import (
    DamagedRun,
    check_name,
    describe_run,
    read_git,
    read_run_file,
    with_gpus,
    write_run_file,
)


def make(folder: Path) -> RunDir:
    folder.mkdir(parents=True)
    run = RunDir(folder)
    argv = ["python", "my train.py", "--lr", "1"]
    write_run_file(
        run,
        describe_run("train", kind="command", argv=argv, settings={"argv": argv}, options={"restart": 3}, cwd=folder),
    )
    return run


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    run = make(tmp_path / "train")
    contents = read_run_file(run)
    assert contents.argv == ("python", "my train.py", "--lr", "1")
    assert contents.command == "python 'my train.py' --lr 1"
    assert (contents.host, contents.boot_id) == (host_name(), boot_id())
    assert contents.options == {"restart": 3}
    assert abs(contents.created_at_s - time.time()) < 600
    write_run_file(run, contents)
    assert read_run_file(run) == contents


def test_the_gpus_of_the_machine_are_kept_with_it(tmp_path: Path) -> None:
    run = make(tmp_path / "train")
    before = read_run_file(run)
    gpus = {"cards": ["NVIDIA A100-SXM4-80GB"] * 2, "card_bytes": [85_899_345_920] * 2}
    write_run_file(run, with_gpus(before, gpus["cards"], gpus["card_bytes"]))
    assert read_run_file(run).machine == {**before.machine, **gpus}
    assert set(before.machine) == {"system", "num_cpus"}


def test_it_can_be_read_without_jackline(tmp_path: Path) -> None:
    value = json.loads((make(tmp_path / "train").path / "run.json").read_text())
    assert (value["format"], value["name"], value["command"]) == (1, "train", "python 'my train.py' --lr 1")


def problem(run: RunDir) -> str:
    with pytest.raises(DamagedRun) as caught:
        read_run_file(run)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_folder_without_it_is_not_a_run(tmp_path: Path) -> None:
    assert problem(RunDir(tmp_path)) == (
        f"error: {tmp_path} is not a run: it has no run.json\nhint: `jackline runs` lists the runs that can be read"
    )


def test_a_torn_one_says_so_and_where_the_log_is(tmp_path: Path) -> None:
    run = make(tmp_path / "train")
    run.run_file.write_bytes(run.run_file.read_bytes()[:-20])
    assert problem(run) == (
        f"error: {run.run_file} is damaged: it is not JSON\n"
        f"       the log is still readable: {run.out_log}\n"
        "hint: restore run.json from a copy, or start again with --new"
    )


@pytest.mark.parametrize("number", [2, 99, None, "1"])
def test_an_unknown_format_asks_for_an_upgrade(tmp_path: Path, number: object) -> None:
    run = make(tmp_path / "train")
    run.run_file.write_text(json.dumps({**json.loads(run.run_file.read_text()), "format": number}))
    assert problem(run) == (
        f"error: {run.run_file} has format {number!r}; this Jackline reads format 1\n"
        "hint: upgrade Jackline: pip install -U jackline"
    )


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("argv", "python train.py", "'argv' should be a list and is 'python train.py'"),
        ("created_at_s", "yesterday", "'created_at_s' should be a time and is 'yesterday'"),
    ],
)
def test_a_field_that_cannot_be_meant_is_named(tmp_path: Path, field: str, value: object, words: str) -> None:
    run = make(tmp_path / "train")
    run.run_file.write_text(json.dumps({**json.loads(run.run_file.read_text()), field: value}))
    assert problem(run).splitlines()[0] == f"error: {run.run_file} is damaged: {words}"


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    run = make(tmp_path / "train")
    value = json.loads(run.run_file.read_text())
    del value["cwd"]
    run.run_file.write_text(json.dumps(value))
    assert problem(run).splitlines()[0] == f"error: {run.run_file} is damaged: it has no 'cwd'"


@pytest.mark.parametrize("name", ["train", "train-2", "a", "9.x_y", "x" * 80])
def test_good_names_are_kept(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a..b", ".hidden", "-x", "a b", "é", "a\n", "x" * 81])
def test_names_that_could_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_name(name)
    assert str(caught.value) == (
        f"error: '{name}' cannot be a run name\n"
        "hint: use letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 80"
    )


def test_git_commit_and_difference_are_recorded(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        settings = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *settings, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert read_git(tmp_path) == {}
    git("init", "-q", "-b", "work")
    (tmp_path / "train.py").write_text("x = 1\n")
    git("add", "train.py")
    git("commit", "-q", "-m", "first")
    clean = read_git(tmp_path)
    assert clean == {"commit": git("rev-parse", "HEAD"), "is_dirty": False, "branch": "work"}
    git("checkout", "-q", "--detach")
    assert read_git(tmp_path) == {"commit": git("rev-parse", "HEAD"), "is_dirty": False}
    (tmp_path / "train.py").write_text("x = 2\n")
    dirty = read_git(tmp_path)
    assert dirty["is_dirty"] and len(dirty["diff_sha256"]) == 64

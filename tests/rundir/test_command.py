"""One command in many spellings: which words decide what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from jackline.rundir.command import plain_command, plain_settings, script_of
from jackline.rundir.identity import default_name

PLAIN = ["python", "x.py", "--lr", "1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "x.py").touch()
    (tmp_path / "link.py").symlink_to("x.py")
    return tmp_path


@pytest.mark.parametrize(
    "typed",
    [
        "python x.py",
        "python3 x.py",
        "python3.11 x.py",
        "/usr/bin/python x.py",
        ".venv/bin/python3 x.py",
        "python -u x.py",
        "python -uB -W ignore -X dev -Werror x.py",
        "python ./x.py",
        "python {folder}/x.py",
        "python sub/../x.py",
        "python link.py",
        "./x.py",
        "{folder}/x.py",
        "nohup python x.py",
        "nice -n 10 python -u x.py",
        "nice python x.py",
        "env python x.py",
        "nohup nice -5 ./x.py",
    ],
)
def test_every_spelling_of_a_script_is_one_command(folder: Path, typed: str) -> None:
    words = [*typed.format(folder=folder).split(), "--lr", "1"]
    assert plain_command(words, str(folder)) == PLAIN


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("python x.py --lr 2", "python x.py --lr 2"),
        ("python x.py -u", "python x.py -u"),
        ("python -m pkg.train --lr 1", "python -m pkg.train --lr 1"),
        ("python3 -um pkg.train --lr 1", "python -m pkg.train --lr 1"),
        ("python -mpkg.train", "python -m pkg.train"),
        ("python -c pass 1", "python -c pass 1"),
        ("python -", "python -"),
        ("python", "python"),
        ("env LR=1 python -u x.py", "env LR=1 python x.py"),
        ("env -i python x.py", "env -i python x.py"),
        ("bash job.sh 1", "bash job.sh 1"),
        ("./job.sh 1", "bash job.sh 1"),
        ("bash -c true", "bash -c true"),
        ("torchrun --nproc-per-node 2 x.py", "torchrun --nproc-per-node 2 x.py"),
        ("./trainer --steps 3", "trainer --steps 3"),
        ("nohup", "nohup"),
    ],
)
def test_what_differs_stays_different(folder: Path, typed: str, plain: str) -> None:
    assert plain_command(typed.split(), str(folder)) == plain.split()


def test_a_script_outside_the_folder_keeps_its_whole_path(folder: Path) -> None:
    (folder / "sub").mkdir()
    assert plain_command(["python", "../x.py"], str(folder / "sub")) == ["python", str(folder / "x.py")]


def test_the_folder_is_part_of_the_identity(folder: Path) -> None:
    """Two folders with the same script are two trainings: data and output are found from the folder."""
    here = plain_settings({"argv": ["python", "x.py"], "cwd": str(folder)})
    there = plain_settings({"argv": ["python", "x.py"], "cwd": str(folder / "sub")})
    assert default_name(["python", "x.py"], here) != default_name(["python", "x.py"], there)


def test_the_plainest_spelling_has_the_name_it_always_had() -> None:
    """Old runs and mirrors are found by this name."""
    settings = {"argv": ["python", "train.py", "--lr", "1"], "cwd": "/nonexistent/me"}
    assert plain_settings(settings) == settings
    assert default_name(settings["argv"], plain_settings(settings)) == "train-7353e9"


def test_settings_of_a_recipe_stay_as_they_are() -> None:
    settings = {"recipe": "demo", "lr": 1e-3, "cwd": "/x/../x"}
    assert plain_settings(settings) == settings
    assert script_of(settings) == ""


def test_the_script_of_a_command() -> None:
    assert script_of({"argv": ["python", "a/x.py", "1"]}) == "a/x.py"
    assert script_of({"argv": ["python", "-m", "pkg", "1"]}) == "-m pkg"
    assert script_of({"argv": ["python", "-c", "pass"]}) == ""
    assert script_of({"argv": "damaged"}) == ""


@pytest.mark.parametrize("word", ["half \ud83d.py", "zero\x00.py"])
def test_a_damaged_command_stays_as_it_is(word: str) -> None:
    settings = {"argv": ["python", word], "cwd": f"/somewhere/{word}"}
    assert plain_settings(settings)["argv"][1].endswith(word)

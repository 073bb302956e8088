"""The entry point, as a real process: what is printed when nothing, or something wrong, was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from jackline.cli.main import cli
from tests.deadline import HANGS_S
from tests.rundir.made import make_run


def jackline(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jackline", *words], cwd=folder, capture_output=True, text=True, timeout=HANGS_S
    )


def test_jackline_alone_prints_its_help_and_that_is_no_error(tmp_path: Path) -> None:
    done = jackline(folder=tmp_path)
    asked_for = jackline("--help", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, asked_for.stdout, "")


def test_a_group_without_a_command_shows_its_help_and_does_not_call_it_an_error(tmp_path: Path) -> None:
    done = jackline("data", folder=tmp_path)
    asked_for = jackline("data", "--help", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == asked_for.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--stuck-after", "soon", "--", "true"),
        ("run", "--grace", "soon", "--", "true"),
        ("run", "--time-limit", "soon", "--", "true"),
        ("stop", "--grace", "soon"),
        ("why", "--for", "soon"),
        ("runs", "prune", "--older", "soon"),
    ],
)
def test_a_length_of_time_is_written_and_refused_in_one_way_everywhere(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    done = CliRunner().invoke(cli, words)
    assert str(done.exception) == "error: 'soon' is not a duration\nhint: write 90, 90s, 15m, 1h30m or 2d"


def test_a_missing_word_is_an_error_and_the_help_is_near(tmp_path: Path) -> None:
    done = jackline("fork", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: Missing argument 'RUN'.\nhint: `jackline fork --help` shows its options\n"


def test_a_hint_of_our_own_is_the_only_one(tmp_path: Path) -> None:
    done = jackline("stats", folder=tmp_path)
    assert done.stderr == "error: there is no command 'stats'\nhint: did you mean 'jackline status'?\n"


def test_the_demo_ends_with_the_first_training_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file in the way")
    done = jackline("demo", folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("error: cannot make a run in ") == 1, done.stderr
    assert "2 of 3" not in done.stderr
    assert "error: the training ended with code 2 before it could be killed\n" in done.stderr, done.stderr


@pytest.mark.parametrize("words", [("runs",), ("status", "mine"), ("logs", "mine")])
def test_a_reader_that_went_away_is_no_error(words: tuple[str, ...], tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "mine").out_log.write_text("2026-11-15T02:00:00.0Z a line of its output\n")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jackline", *words],
            cwd=tmp_path,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANGS_S,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")

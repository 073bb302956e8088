"""`jackline demo`: short enough to be read, and honest about what it compares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.cli.commands.demo import compare
from jackline.rundir.layout import RunDir
from tests.shell import Shell


def make_run(folder: Path, losses: dict[int, float], weights: bytes) -> RunDir:
    run = RunDir(folder)
    (run.checkpoints / "step-00000040").mkdir(parents=True)
    (run.checkpoints / "step-00000040" / "model.safetensors").write_bytes(weights)
    run.metrics(0).write_text(
        "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in losses.items())
    )
    return run


LOSSES = {step: 3.0 / step for step in range(1, 41)}


def test_equal_trainings_are_called_equal_and_unwritten_losses_are_counted(tmp_path: Path) -> None:
    some = {step: loss for step, loss in LOSSES.items() if step not in (19, 20)}
    lines, is_equal = compare(make_run(tmp_path / "a", some, b"w"), make_run(tmp_path / "b", LOSSES, b"w"))
    assert is_equal
    assert lines[-2] == "losses of 38 steps: all bit-equal (2 more were not written down yet when it was killed)"
    assert re.fullmatch(r"final weights: sha256 [0-9a-f]{12} and [0-9a-f]{12}: bit-equal", lines[-1])
    assert all(line.endswith("bit-equal") for line in lines[:3]) and len(lines) == 5


def test_one_differing_bit_is_not_equal(tmp_path: Path) -> None:
    other = {**LOSSES, 30: LOSSES[30] + 2**-50}
    lines, is_equal = compare(make_run(tmp_path / "a", other, b"w"), make_run(tmp_path / "b", LOSSES, b"w"))
    assert not is_equal and lines[-2] == "losses of 40 steps: NOT equal from step 30 on"
    lines, is_equal = compare(make_run(tmp_path / "c", LOSSES, b"v"), make_run(tmp_path / "d", LOSSES, b"w"))
    assert not is_equal and lines[-1].endswith(": NOT equal")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    person = Shell(tmp_path / "person")
    yield person
    person.close()


@pytest.mark.slow
def test_the_demo_kills_resumes_and_compares_in_25_lines(shell: Shell) -> None:
    done = shell.jackline("demo", "--runs-dir", str(shell.runs), env={"JACKLINE_DATA": str(shell.folder / "data")})
    assert done.code == 0, done
    assert done.out == ""
    assert len(done.err.splitlines()) <= 25, done
    assert max(map(len, done.err.splitlines())) <= 160
    assert re.search(r"^  \$ kill -9 \d+$", done.err, re.MULTILINE)
    assert re.search(r"^  losses of \d+ steps: all bit-equal", done.err, re.MULTILINE)
    assert re.search(r"^  final weights: sha256 (\w+) and \1: bit-equal$", done.err, re.MULTILINE)

"""`jackline validate`: what it asks for, and whom it cannot ask."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.cli.commands.model import VALIDATE_SCHEMA
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import ProcessId, identify
from tests.cli.test_watch import begin, run  # noqa: F401
from tests.docs.json_reference import check_answer

GOLDEN = Path(__file__).parents[1] / "golden"


def validate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "jackline", "validate", *words], capture_output=True, text=True)


@pytest.fixture
def alive(run: RunDir) -> RunDir:  # noqa: F811
    found = identify(os.getpid())
    assert found is not None
    begin(run, found)
    return run


def test_a_training_that_runs_is_asked_by_a_file_in_its_folder(alive: RunDir) -> None:
    alive.config_file.write_text("model: nano\n")

    done = validate("mine")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "asked run 'mine' for a full validation; `jackline logs mine` shows it\n"
    assert alive.validation_request.exists()


def test_a_program_gets_json(alive: RunDir) -> None:
    alive.config_file.write_text("model: nano\n")
    done = validate("mine", "--json")
    assert done.returncode == 0 and alive.validation_request.exists()
    check_answer(VALIDATE_SCHEMA, json.loads(done.stdout))


def test_a_script_of_somebody_else_cannot_be_asked(alive: RunDir) -> None:
    done = validate("mine")

    assert done.returncode == 2
    assert done.stderr == (
        "error: run 'mine' is not a training of ours, or has not come to its first step yet\n"
        "hint: `jackline train` validates; a script under `jackline run` does so itself\n"
    )
    assert not alive.validation_request.exists()


def test_a_run_that_is_over_cannot_be_asked(run: RunDir) -> None:  # noqa: F811
    found = identify(os.getpid())
    assert found is not None
    begin(run, ProcessId(2**22 - 1, 1, found.host, found.boot_id))

    done = validate("mine")

    assert done.returncode == 2
    assert done.stderr == (
        "error: run 'mine' is not running: it is gone, and nobody saw how it ended\n"
        "hint: `jackline resume mine` continues it; `jackline eval mine` evaluates what it has saved\n"
    )


def test_a_finished_run_is_evaluated_instead_of_resumed(clean_environment: Path) -> None:
    shutil.copytree(GOLDEN / "format1-finished", clean_environment / "done")
    done = validate("done")
    assert done.returncode == 2 and "is not running: it has finished" in done.stderr, done.stderr
    assert done.stderr.endswith("\nhint: `jackline eval done` evaluates what it has saved\n")

"""A stranger's script only prints; its losses, its progress and its end are still known."""

from __future__ import annotations

import json

import pytest

from jackline.rundir.layout import RunDir
from jackline.rundir.records.metrics import read_series
from tests.shell import Shell

pytestmark = pytest.mark.zoo

# Prints every tenth step, as most scripts do: the last line is not the last step.
TRAINS = """
import logging
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
for step in range(100):
    if step % 10 == 0:
        logging.info("step %d/100 loss %.4f lr 3e-4", step, 3.0 / (1 + step))
"""


def test_the_losses_that_a_script_prints_are_kept_as_metrics(shell: Shell) -> None:
    assert shell.jackline("run", "--name", "prints", "--", *shell.python("train.py", TRAINS)).code == 0
    found = {series.name: series for series in read_series(RunDir(shell.runs / "prints"))}
    assert set(found) == {"loss", "lr"}
    assert [point.step for point in found["loss"].points] == [float(step) for step in range(0, 100, 10)]
    assert found["loss"].points[0].value == 3.0
    state = json.loads((shell.runs / "prints" / "supervisor.json").read_text())
    assert state["printed"][0]["name"] == "loss"


def test_a_finished_run_does_not_end_at_ninety_percent(shell: Shell) -> None:
    assert shell.jackline("run", "--name", "prints", "--", *shell.python("train.py", TRAINS)).code == 0
    table = shell.jackline("runs").out
    assert "90 %" not in table
    assert "done; 90/100 printed last" in table
    assert "  progress:   done; 90 of 100 steps printed last\n" in shell.jackline("status", "prints").out

"""Scripts in other shapes: without an optimizer, in a thread or another process, with `sys.exit`, and so on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from jackline.rundir.records.rescue import RescueRecord, read_rescues, rescue_text
from tests.deadline import HANGS_S
from tests.rescue import matrix


def _ended(script: str, way: str, folder: Path, *codes: int) -> tuple[RescueRecord, str]:
    """How it was rescued, and its output."""
    cell = matrix.start(script, folder, way)
    try:
        assert cell.process.wait(HANGS_S) in (codes or (1,)), cell.output()
        (record,) = read_rescues(cell.attempt)
        assert matrix.compare(record, folder) == "", cell.output()
        return record, cell.output()
    finally:
        cell.end()


def test_a_script_that_updates_its_weights_by_hand_can_be_asked(tmp_path: Path) -> None:
    """Its first backward pass shows that it trains. Nothing counts its steps, which is said."""
    cell = matrix.start("by_hand", tmp_path, "stuck")
    try:
        cell.wait_for("the first backward pass", cell.attempt.rescue_door(cell.process.pid).exists)
        cell.wait_for("its last step", (tmp_path / "truth-12.pt").exists)
        record = cell.ask(0.2)
        assert matrix.compare(record, tmp_path) == ""
        assert (record.step, record.is_boundary) == (None, False)
        assert rescue_text(record).startswith("rescued the state because it was asked for: ")
        assert record.missing == (
            "the number of steps: this script updates its weights without an optimizer of torch",
        )
    finally:
        cell.end()


def test_an_optimizer_that_has_not_stepped_yet_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time, torch\nmodel = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(model.parameters())\n"
        "model(torch.ones(1, 2)).sum().backward()\npathlib.Path(os.environ['TRUTH'], 'there').touch()\n"
        "while True: time.sleep(0.05)\n"
    )
    cell = matrix.start_file(tmp_path / "train.py", tmp_path, "stuck")
    try:
        cell.wait_for("the first backward pass", (tmp_path / "there").exists)
        cell.wait_for("its listener", cell.attempt.rescue_door(cell.process.pid).exists)
        assert cell.ask(0.2).missing == ("the number of steps: its optimizer has not stepped yet",)
    finally:
        cell.end()


@pytest.mark.slow
def test_a_script_that_updates_its_weights_by_hand_is_asked_before_a_forward_pass(tmp_path: Path) -> None:
    cell = matrix.start("by_hand", tmp_path, "asked")
    try:
        cell.wait_for("its first steps", (tmp_path / "truth-5.pt").exists)
        for _ in range(2):  # without a number of steps both have the same name
            record = cell.ask(HANGS_S)
            assert (record.outcome, record.moment) == ("saved", "before the next forward pass")
        weights = matrix.tensors_of(Path(record.path))["model"]
        truths = [torch.load(path, weights_only=False)["model"] for path in tmp_path.glob("truth-*.pt")]
        assert any(matrix._is_equal(weights, truth) for truth in truths)
    finally:
        cell.end()


def test_the_first_backward_pass_is_in_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.zeros(2, requires_grad=True).backward()\n")
    texts = []
    for name in ("plain", "armed"):
        cell = matrix.start_file(tmp_path / "train.py", tmp_path / name, "finish", is_armed=name == "armed")
        assert cell.process.wait(HANGS_S) == 1
        texts.append(cell.output())
    assert texts[0] == texts[1] and "grad can be implicitly created only for scalar" in texts[0]


def test_sys_exit_with_a_status_that_is_no_success_is_rescued(tmp_path: Path) -> None:
    record, output = _ended("sys_exit", "none", tmp_path)
    assert (record.cause, record.step) == ("exit", 12)
    assert {part["expression"] for part in record.parts} == {"model", "opt"}
    assert output.endswith("Loss is nan, stopping training\n")


@pytest.mark.slow
def test_an_exception_that_the_script_handles_by_leaving_is_rescued_with_its_names(tmp_path: Path) -> None:
    record, _ = _ended("handled", "exception", tmp_path)
    assert record.cause == "exit" and {part["expression"] for part in record.parts} == {"model", "opt"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exception", "interrupt", "stuck"])
def test_a_training_in_a_thread_is_rescued(way: str, tmp_path: Path) -> None:
    """Ctrl-C comes to the main thread, which only waits: the training goes on meanwhile. A daemon thread inside torch
    aborts the process when Python ends, also without Jackline."""
    if way == "stuck":
        assert matrix.run_cell("in_a_thread", way, tmp_path) == ""
        return
    codes = {"exception": (0,), "interrupt": (-signal.SIGINT, -signal.SIGABRT)}[way]
    record, _ = _ended("in_a_thread", way, tmp_path, *codes)
    assert {part["expression"] for part in record.parts} == {"model", "opt"}
    assert record.is_boundary == (way != "exception")


@pytest.mark.slow
def test_a_training_in_a_process_of_multiprocessing_is_rescued(tmp_path: Path) -> None:
    record, _ = _ended("in_a_process", "exception", tmp_path)
    assert record.cause == "exception" and {part["expression"] for part in record.parts} == {"model", "opt"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exception", "asked"])
def test_what_is_held_in_other_ways_is_named(way: str, tmp_path: Path) -> None:
    assert matrix.run_cell("held_in_other_ways", way, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exception", "asked"])
def test_what_cannot_be_copied_does_not_keep_the_rest_from_being_rescued(way: str, tmp_path: Path) -> None:
    assert matrix.run_cell("not_all_can_be_copied", way, tmp_path) == ""


def test_a_rescue_at_sigterm_outlives_the_workers_of_a_loader(tmp_path: Path) -> None:
    record, _ = _ended("its_workers_end_with_it", "sigterm", tmp_path, -signal.SIGTERM)
    assert (record.cause, record.outcome, record.step) == ("sigterm", "saved", 12)
    assert "average" in {part["expression"] for part in record.parts}

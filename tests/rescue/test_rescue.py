"""Rescues of unchanged scripts. The whole matrix is `scripts/torture rescue`; here are a few of its cells."""

from __future__ import annotations

import ast
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jackline.checkpoint.rescue.live import CannotRescue, find_state
from jackline.checkpoint.rescue.names import Scope, reached
from jackline.checkpoint.rescue.places import list_places
from jackline.checkpoint.rescue.take import too_dear
from jackline.checkpoint.state.attributes import Baseline
from jackline.checkpoint.state.capture import capture
from jackline.cli.commands.run import wants_rescue
from jackline.cli.rescue.patch import loading_text
from jackline.errors import UsageError
from jackline.rundir.layout import AttemptDir
from jackline.rundir.process_id import identify
from jackline.rundir.records.rescue import (
    RescueRecord,
    newest_rescue,
    read_rescue,
    read_rescues,
    rescue_lines,
    write_rescue,
)
from jackline.rundir.records.start import read_start, write_start
from jackline.supervisor.attempt.rescuing import is_answer, next_interval_s
from tests.deadline import HANGS_S
from tests.rescue import matrix, zoo

MIB = 1 << 20


def test_a_script_that_is_stuck_on_a_lock_is_rescued(tmp_path: Path) -> None:
    """And SIGTERM then ends it as if we were not there, after another rescue."""
    cell = matrix.start("function", tmp_path, "stuck")
    try:
        cell.wait_for("its first step", cell.attempt.rescue_door(cell.process.pid).exists)
        cell.wait_for("its last step", (tmp_path / "truth-12.pt").exists)
        stuck = cell.ask(0.2)
        assert (stuck.step, stuck.is_boundary) == (12, False)
        assert (
            stuck.moment == "not at a step boundary (no step ended within 0.2 s): the weights are those after step 12"
        )
        assert {part["expression"] for part in stuck.parts} == {"model", "optimizer", "scheduler"}
        assert matrix.compare(stuck, tmp_path) == ""
        cell.process.send_signal(signal.SIGTERM)
        assert cell.process.wait(HANGS_S) == -signal.SIGTERM
        ended = cell.record()
        assert (ended.cause, ended.outcome, ended.step) == ("sigterm", "saved", 12)
    finally:
        cell.end()


def test_a_weak_proxy_of_another_object_is_not_saved() -> None:
    """As frameworks keep the way back to what holds a module."""
    model, holder = nn.Linear(2, 2), nn.Linear(3, 3)
    (baseline := Baseline()).note(model)
    model.__dict__["holder"] = weakref.proxy(holder)
    sources = capture({"model": model}, baseline=baseline).sources
    assert [tuple(source.tensor.shape) for source in sources] == [(2, 2), (2,)]


def test_a_rescue_is_the_default_unless_a_script_saves_or_nothing_is_put_into_it() -> None:
    asked = {"rescue": None, "rescue_every": None, "no_inject": False}
    assert wants_rescue(asked, saves_itself=False) and not wants_rescue(asked, saves_itself=True)
    assert wants_rescue({**asked, "rescue": True}, saves_itself=True)
    assert wants_rescue({**asked, "rescue_every": 600.0}, saves_itself=True)
    assert not wants_rescue({**asked, "rescue": False}, saves_itself=False)
    assert not wants_rescue({**asked, "no_inject": True}, saves_itself=False)
    for wrong in ({"rescue": True, "no_inject": True}, {"rescue": False, "rescue_every": 600.0}):
        with pytest.raises(UsageError):
            wants_rescue({**asked, **wrong}, saves_itself=False)


def test_a_rescue_between_steps_changes_no_loss(tmp_path: Path) -> None:
    """A GAN with two optimizers, asked in the middle: its losses equal those without Jackline."""
    plain = matrix.start("gan", tmp_path / "plain", "finish", is_armed=False)
    cell = matrix.start("gan", tmp_path / "armed", "asked")
    try:
        cell.wait_for("its first steps", (tmp_path / "armed/truth-5.pt").exists)
        record = cell.ask(HANGS_S)
        assert record.is_boundary and "before the next forward pass" in record.moment
        assert matrix.compare(record, tmp_path / "armed") == ""
        assert plain.process.wait(HANGS_S) == 0
        expected = plain.output().splitlines()  # a line for each loss
        cell.wait_for("as many steps", lambda: cell.output().count("\n") > len(expected))
        assert len(expected) == 12 and cell.output().splitlines()[:12] == expected
    finally:
        cell.end()
        plain.end()


def test_a_crash_under_supervision_is_rescued_said_and_can_be_loaded(tmp_path: Path) -> None:
    script = zoo.source_of("ema_dict")
    (tmp_path / "train.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(Path(matrix.__file__).parent), "WAY": "exception", "TRUTH": str(tmp_path)}
    line = [sys.executable, "-m", "jackline", "run", "--name", "a", "--", sys.executable, "train.py"]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 1, done.stdout + done.stderr
    (record,) = read_rescues(AttemptDir(tmp_path / "runs/a/attempts/001"))
    assert matrix.compare(record, tmp_path) == ""
    for said in rescue_lines(record):
        assert said in done.stderr
    assert "rescued the state of step 12 at an uncaught exception" in done.stderr
    assert not list((tmp_path / "runs/a/attempts/001/stacks").glob("ask.*"))
    # The patch makes the script resume: it is applied, and the first thing that the script now sees is step 12.
    patch = loading_text(record, Path(record.path))
    assert patch.startswith("--- ") and "+model.load_state_dict(" in patch and "+load_optimizer(opt, " in patch
    (tmp_path / "change.patch").write_text(patch)
    line = ["patch", "-p1", "-d", "/" if "a/train.py" not in patch else ".", "-i", str(tmp_path / "change.patch")]
    subprocess.run(line, cwd=tmp_path, check=True, capture_output=True, timeout=HANGS_S)
    loop = "for step in"
    check = "torch.save({'model': model.state_dict(), 'opt': opt.state_dict(), 'ema': ema}, 'again.pt')\n"
    patched = (tmp_path / "train.py").read_text()
    (tmp_path / "resumed.py").write_text(patched[: patched.index(loop)] + check + f"print({loop!r})\n")
    subprocess.run([sys.executable, "resumed.py"], cwd=tmp_path, env=env, check=True, timeout=HANGS_S)
    again = torch.load(tmp_path / "again.pt", weights_only=False)
    truth = torch.load(tmp_path / "truth-12.pt", weights_only=False)
    assert matrix._is_equal(again["model"], truth["model"]) and matrix._is_equal(again["ema"], truth["ema"])
    assert matrix._is_equal(again["opt"]["state"], truth["opt"]["state"])


@pytest.mark.slow
def test_steps_that_a_gradient_scaler_left_out_do_not_count(tmp_path: Path) -> None:
    """Its scale grows until a step is left out: the optimizer has then made fewer steps than the script counts."""
    cell = matrix.start("amp", tmp_path, "asked")
    try:
        cell.wait_for("a step that was left out", (tmp_path / "truth-40.pt").exists)
        record = cell.ask(HANGS_S)
        assert record.is_boundary and record.step is not None and record.step < record.values["step"] - 1
        assert matrix.compare(record, tmp_path) == ""
    finally:
        cell.end()


@pytest.mark.slow
@pytest.mark.parametrize("way", matrix.WAYS)
@pytest.mark.parametrize("script", zoo.SCRIPTS)
def test_the_whole_matrix(script: str, way: str, tmp_path: Path) -> None:
    assert matrix.run_cell(script, way, tmp_path) == ""


# -- what is found ---------------------------------------------------------------------------------------------------


class _Holder:
    def __init__(self, **things: object) -> None:
        self.__dict__.update(things)

    @property
    def dangerous(self) -> None:
        raise AssertionError("a property ran")


def _stepped(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for value in parameters:
        value.grad = torch.ones_like(value)
    optimizer.step()
    return optimizer


def _find(**names: object) -> tuple[dict[str, str], list[str]]:
    live = {"module": [], "optimizer": [], "scheduler": [], "scaler": []}
    from jackline.checkpoint.rescue import live as module

    every = module.live_objects()
    wanted = [value for value in reached([Scope("a.py", "train", 3, names)], 4)]
    ids = {id(value) for value, _, _ in wanted}
    for kind in live:
        live[kind] = [one for one in every[kind] if id(one) in ids]
    found = find_state([Scope("a.py", "train", 3, names)], live)
    return {part.key: part.kind for part in found.parts}, found.missing


def test_names_come_from_variables_attributes_and_containers() -> None:
    net, nets = nn.Linear(2, 2), [nn.Linear(2, 1)]
    holder = _Holder(model=net, optim=_stepped(*net.parameters(), *nets[0].parameters()))
    found, missing = _find(self=holder, nets=nets, loss=nn.MSELoss())
    assert found == {"model": "module", "nets.0": "module", "optim": "optimizer"} and missing == []


def test_an_attribute_names_better_than_a_dictionary_that_was_made_for_a_call() -> None:
    net = nn.Linear(2, 2)
    optimizer = _stepped(*net.parameters())
    call = Scope("log.py", "note", 7, {"objects": {"net": net, "optim": optimizer}})
    found = find_state([call, Scope("a.py", "train", 3, {"self": _Holder(net=net, optim=optimizer)})])
    names = {part.key: part.expression for part in found.parts if part.value in (net, optimizer)}
    assert names == {"net": "self.net", "optim": "self.optim"}


def test_an_average_in_a_list_and_a_loose_parameter_are_found() -> None:
    net, alpha = nn.Linear(2, 2), torch.zeros(1, requires_grad=True)
    shadow = [value.detach().clone() for value in net.parameters()]
    found, _ = _find(net=net, opt=_stepped(*net.parameters(), alpha), shadow=shadow, alpha=alpha)
    assert found == {"net": "module", "opt": "optimizer", "loose_parameters": "tensors", "shadow": "tensors"}


def test_a_wrapper_is_saved_as_what_it_wraps() -> None:
    net = nn.Linear(2, 2)
    fast = torch.compile(net, backend="eager")
    found = find_state([Scope("a.py", "train", 3, {"fast": fast, "opt": _stepped(*net.parameters())})])
    (part,) = [part for part in found.parts if part.expression == "fast"]
    assert part.value is net and part.is_wrapped


def test_shards_and_an_empty_process_are_refused_in_words() -> None:
    class DTensor(nn.Parameter):
        pass

    net = nn.Linear(2, 2)
    net.weight = DTensor(net.weight.detach())
    with pytest.raises(CannotRescue, match="sharded over processes"):
        _find(net=net, opt=_stepped(net.bias))
    with pytest.raises(CannotRescue, match="no module with parameters"):
        _find(loss=nn.MSELoss())


# -- decisions -------------------------------------------------------------------------------------------------------


def test_a_rescue_nobody_asked_for_is_worth_its_space() -> None:
    assert too_dear(60 * MIB, 1000 * MIB, 0.5) == ""
    assert too_dear(1500 * MIB, 100_000 * MIB, 80.0) == ""
    assert "only 10 s were trained" in too_dear(1500 * MIB, 100_000 * MIB, 10.0)
    assert "the disk has" in too_dear(300 * MIB, 1000 * MIB, 3600.0)


def test_periodic_rescues_hold_the_training_for_half_a_percent_at_most() -> None:
    assert next_interval_s(600.0, 0.05) == 600.0
    assert next_interval_s(60.0, 2.0) == 400.0


def test_a_rescue_of_a_run_without_one_says_why(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "jackline", "run", "--name", "a", "--", sys.executable, "-c", "print(1)"]
    subprocess.run(line, cwd=tmp_path, check=True, capture_output=True, timeout=HANGS_S)
    done = subprocess.run(
        [sys.executable, "-m", "jackline", "rescue", "a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 2 and "nothing was rescued of run 'a'" in done.stderr
    assert "hint: `jackline why a` tells how it ended; SIGKILL and" in done.stderr
    start = read_start(AttemptDir(tmp_path / "runs/a/attempts/001"))
    again = AttemptDir(tmp_path / "runs/a/attempts/002")
    again.path.mkdir()
    write_start(again, replace(start, child=identify(os.getpid()), keeper=None))
    line = [sys.executable, "-m", "jackline", "rescue", "a", "--load"]
    live = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
    assert live.returncode == 2 and "hint: it is alive: `jackline rescue a` asks it for its state" in live.stderr
    shutil.rmtree(tmp_path / "runs")


def test_a_rescue_that_fails_does_not_take_the_place_of_one_that_was_saved(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "runs/a/attempts/001")
    attempt.path.mkdir(parents=True)
    saved = RescueRecord(id="1", pid=7, cause="asked", outcome="saved", path="/x/step-00000025", step=25, at_s=5.0)
    refused = RescueRecord(id="2", pid=7, cause="sigterm", outcome="refused", why="the disk is full", at_s=6.0)
    for record in (saved, refused, replace(refused, id="3", at_s=7.0)):
        write_rescue(attempt, record)
    assert read_rescue(attempt, 7).id == "3"  # what was asked last gets its answer
    assert [one.id for one in read_rescues(attempt)] == ["3", "1"] and newest_rescue([attempt]) == saved
    write_rescue(attempt, replace(saved, id="4", step=30, at_s=8.0))
    assert [one.id for one in read_rescues(attempt)] == ["4"]


def test_who_asks_twice_at_once_waits_for_neither_answer_in_vain() -> None:
    """A process keeps its last answer only, and the first may be gone before it is read."""
    later = RescueRecord(id="41-2000", outcome="saved")
    assert is_answer(later, "41-2000") and is_answer(later, "77-1999")
    assert not is_answer(later, "77-2001") and not is_answer(RescueRecord(outcome="saved"), "77-1999")
    assert not is_answer(RescueRecord(id="join-41-x"), "77-1999")


def test_a_record_that_is_damaged_counts_as_absent(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "001")
    attempt.path.mkdir()
    attempt.rescue_file(7).write_text(json.dumps({"outcome": 5, "parts": "x", "missing": [1, "a"]}))
    attempt.rescue_file(8).write_text("{")
    assert read_rescues(attempt) == []


EVIL = "__import__('os').system('touch /tmp/x')"


@pytest.mark.parametrize(
    "part",
    [
        {"expression": f"model; {EVIL}"},
        {"expression": f"f({EVIL})"},
        {"expression": f"nets[{EVIL}]"},
        {"expression": f"model\n{EVIL}\nmodel"},
        {"expression": f"model #\n{EVIL}"},
        {"class": f"Net)\n{EVIL} #", "expression": ""},
        {"file": f"a.py\n{EVIL}", "expression": "model"},
        {"key": f"m{{{EVIL}}}"},
        {"key": f"m'\n{EVIL}"},
    ],
)
def test_a_record_of_somebody_else_puts_no_code_into_the_lines_that_load_it(tmp_path: Path, part: Any) -> None:
    """They are printed to be pasted into a script. Comments, names and assignments may be in them, and our calls."""
    golden = Path(__file__).parents[1] / "golden" / "checkpoint-1" / "step-00000003"
    plain = {"key": "model", "kind": "module", "class": "Net", "expression": "model", "function": "<module>"}
    record = RescueRecord(
        outcome="saved",
        function="<module>",
        step=3,
        parts=({**plain, "file": "", **part}, {**plain, "file": "", "key": "optim", "kind": "optimizer"}),
        missing=(f"this\n{EVIL}",),
        values={f"epoch\n{EVIL}": 3},
    )
    text = loading_text(record, golden, is_ours=False)
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
    assert not called & {"__import__", "__import__('os').system"}, text


def test_of_a_run_of_somebody_else_no_script_is_read_that_it_names(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "checkpoint-1" / "step-00000003"
    script = tmp_path / "private.py"
    script.write_text("password = 'secret-word'\nfor step in range(3):\n    pass\n")
    place = {"file": str(script), "function": "<module>", "line": 3, "names": {"model": "password"}}
    record = RescueRecord(outcome="saved", file=str(script), function="<module>", line=3, step=3, places=(place,))
    assert "secret-word" in loading_text(record, golden, is_ours=True)
    assert "secret-word" not in loading_text(record, golden, is_ours=False)


class _Slots:
    __slots__ = ("critic", "unset")


def test_names_come_from_slots_named_tuples_classes_and_ordered_dictionaries() -> None:
    nets = [nn.Linear(2, 2) for _ in range(4)]
    slots, kind = _Slots(), type("Config", (), {"__module__": "__main__", "head": nets[1]})
    slots.critic = nets[0]
    state = namedtuple("State", "model other")(nets[2], None)
    found, _ = _find(slots=slots, Config=kind, state=state, more=OrderedDict(last=nets[3]))
    assert set(found) == {"slots.critic", "Config.head", "state.model", "more.last"}


def test_numbers_of_numpy_and_of_host_tensors_are_values(tmp_path: Path) -> None:
    net = nn.Linear(1, 1)
    names = {"net": net, "best": np.float32(0.5), "worst": torch.tensor(2.5), "wide": torch.zeros(3), "step": 7}
    live = {"module": [net], "optimizer": [], "scheduler": [], "scaler": []}
    scope = Scope("a.py", "train", 3, names)
    (place,) = list_places([scope], find_state([scope], live).parts)
    assert place["values"] == {"best": 0.5, "worst": 2.5, "step": 7}


def test_an_average_that_nobody_names_is_saved_and_weights_without_memory_are_said() -> None:
    net = nn.Linear(2, 2)
    average, other = copy.deepcopy(net), nn.Linear(3, 3)
    with torch.device("meta"):
        teacher = nn.Linear(9, 9)
    live = {"module": [net, average, other, teacher, lazy := nn.LazyLinear(2)], "optimizer": []}
    scope = Scope("a.py", "train", 3, {"net": net, "teacher": teacher, "lazy": lazy})
    found = find_state([scope], {**live, "scheduler": [], "scaler": []})
    assert [part.value for part in found.parts] == [net, average]
    assert found.missing == [
        "teacher (Linear): its weights are on the meta device, which has none",
        "lazy (LazyLinear): its parameters have no size yet",
        "a Linear of 48 B that no variable names and no optimizer trains",
    ]

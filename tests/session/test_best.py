"""`keep_best`: `best` is a checkpoint whose weights gave the value, wherever a loop measures it, and it survives."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.format.verify import read_manifest
from jackline.checkpoint.rewind import go_back
from jackline.checkpoint.writer.retention import best_checkpoint
from jackline.rundir.layout import RunDir
from tests.deadline import read_best_name
from tests.session.nursery import Nursery

# The weight walks up to the target, away from it and on; its distance to the target is what is measured.
HEAD = """
import os, signal, sys
import torch, jackline
torch.set_num_threads(1)
torch.manual_seed(0)
WHERE, TARGET = sys.argv[1], 4.0
model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1))
torch.nn.init.zeros_(model[0].weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
held_out = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)

def train():
    model(torch.randn(4, 1)).sum()  # moves the running averages, draws random numbers
    model[0].weight.grad = torch.full((1, 1), -1.0)
    optimizer.step()

def die_at(step):
    if os.environ.get("DIE") == str(step): os.kill(os.getpid(), signal.SIGKILL)

def measure(run):
    for _ in held_out:  # an iterator draws from torch's generator
        pass
    value = abs(model[0].weight.item() - TARGET)
    print("measured", run.step, value, flush=True)
    return value

settings = dict(model=model, optimizer=optimizer, name="x", save_every_steps=5, keep_last=2, seed=1)
"""
TAIL = """
print("final", model[0].weight.item().hex(), model[1].running_mean.item().hex(), torch.rand(()).item().hex())
"""
IN_STEPS = """
with jackline.attach(**settings, keep_best="val") as run:
    for batch in run.steps(total=int(sys.argv[2])):
        if WHERE == "top" and run.step % 2 == 0: run.log(val=measure(run))
        train()
        run.log(loss=1.0)
        if WHERE == "after" and run.step % 2 == 0: run.log(val=measure(run))
        if WHERE == "top" or run.step % 2: die_at(run.step)
    if WHERE == "end": run.log(val=measure(run))
"""
IN_EPOCHS = """
loader = torch.utils.data.DataLoader(torch.ones(6), batch_size=2, shuffle=True)
with jackline.attach(**settings, loader=loader, keep_best="val") as run:
    if WHERE == "epochs":
        for epoch in run.epochs(3):
            for batch in run.steps(): train(); die_at(run.step)
            run.log(val=measure(run))
    else:
        for epoch in range(3):
            for batch in run.steps(): train(); die_at(run.step)
            run.log(val=measure(run))
"""


@dataclass(frozen=True)
class Best:
    step: int
    value: float
    weight: float


def read_best(folder: Path, metric: str = "val") -> Best:
    checkpoints = folder / "runs" / "x" / "checkpoints"
    path = checkpoints / read_best_name(checkpoints)
    manifest = read_manifest(path)
    (weight,) = (
        tensor for name, tensor in load_file(path / "model.safetensors").items() if name.endswith("0.weight")
    )
    return Best(manifest.step, manifest.metrics[metric], weight.item())


def measured(output: str) -> list[tuple[float, int]]:
    return [(float(value), int(step)) for step, value in re.findall(r"measured (\d+) (\S+)", output)]


def final(output: str) -> str:
    return output[output.index("final") :].splitlines()[0]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (IN_STEPS, ["top", "17"]),
        (IN_STEPS, ["after", "17"]),
        (IN_STEPS, ["end", "7"]),
        (IN_EPOCHS, ["epochs"]),
        (IN_EPOCHS, ["own count"]),
    ],
    ids=["top", "after", "end", "epochs", "own-count"],
)
def test_best_is_the_checkpoint_whose_weights_gave_the_value(
    script: str, arguments: list[str], nursery: Nursery, tmp_path: Path
) -> None:
    ended = nursery.run(HEAD + script + TAIL, arguments, tmp_path)
    assert ended.code == 0, ended.output
    value, step = min(measured(ended.output))
    assert read_best(tmp_path) == Best(step, value, float(step)), ended.output


@pytest.mark.parametrize("where", ["top", "after"])
def test_a_save_for_the_best_is_exact_to_resume_from_and_the_best_survives_the_resume(
    where: str, nursery: Nursery, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    wanted = nursery.run(HEAD + IN_STEPS + TAIL, [where, "17"], whole)
    assert wanted.code == 0, wanted.output
    # Killed right after the best was saved, which is then the newest, and once more long after.
    for step in ("5", "11"):
        died = nursery.run(HEAD + IN_STEPS + TAIL, [where, "17"], tmp_path, {"DIE": step})
        assert died.code == -9, died.output
    ended = nursery.run(HEAD + IN_STEPS + TAIL, [where, "17"], tmp_path)
    assert ended.code == 0 and final(ended.output) == final(wanted.output), ended.output
    assert read_best(tmp_path) == Best(4, 0.0, 4.0)


def test_a_value_of_an_earlier_step_is_not_put_on_a_later_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    script = HEAD + IN_STEPS.replace("keep_best", "keep_every=1, keep_best") + TAIL
    ended = nursery.run(script, ["after", "17"], tmp_path)
    assert ended.code == 0, ended.output
    checkpoints = tmp_path / "runs" / "x" / "checkpoints"
    found = {path.name: read_manifest(path).metrics for path in checkpoints.glob("step-*")}
    values = {step: value for value, step in measured(ended.output)}
    assert {name: metrics.get("val") for name, metrics in found.items()} == {
        name: values.get(int(name[5:13])) for name in found
    }
    assert any("val" not in metrics for metrics in found.values())


def test_of_several_values_of_one_step_the_last_counts_and_what_is_not_finite_never(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = """
VALUES = {2: [9.0, 5.0], 4: [1.0, 7.0], 6: [float("nan")], 8: [float("inf")], 10: [float("-inf")], 12: [5.0]}
with jackline.attach(**settings, keep_best=sys.argv[1]) as run:
    for batch in run.steps(total=14):
        train()
        for value in VALUES.get(run.step, []): run.log(val=value)
"""
    assert nursery.run(HEAD + script, ["val"], tmp_path).code == 0
    assert read_best(tmp_path) == Best(2, 5.0, 2.0)
    higher = tmp_path / "higher"
    higher.mkdir()
    assert nursery.run(HEAD + script, ["+val"], higher).code == 0
    assert read_best(higher) == Best(4, 7.0, 4.0)


def test_a_number_of_every_step_makes_no_save_of_its_own_each_time(nursery: Nursery, tmp_path: Path) -> None:
    script = """
with jackline.attach(**settings, keep_best="loss") as run:
    for batch in run.steps(total=17):
        train()
        run.log(loss=100.0 - run.step)
"""
    ended = nursery.run(HEAD + script, ["each"], tmp_path)
    assert ended.code == 0, ended.output
    lines = (tmp_path / "runs" / "x" / "events-0.jsonl").read_text().splitlines()
    saved = [event["step"] for event in map(json.loads, lines) if event["event"] == "checkpoint_committed"]
    # A busy writer skips one that is due; the first value and the end are saved in any case.
    assert len(saved) <= 6 and {1, 17} <= set(saved)
    assert read_best(tmp_path, "loss") == Best(17, 83.0, 17.0)


def test_the_best_of_a_line_that_was_left_behind_does_not_win(nursery: Nursery, tmp_path: Path) -> None:
    script = IN_STEPS.replace("keep_best", "keep_every=1, keep_best")
    assert nursery.run(HEAD + script, ["after", "13"], tmp_path).code == 0
    assert read_best(tmp_path).step == 4
    go_back(RunDir(tmp_path / "runs" / "x"), "2", mirror=None, say=print)
    again = HEAD.replace("TARGET = sys.argv[1], 4.0", "TARGET = sys.argv[1], -1.0") + script
    ended = nursery.run(again, ["after", "13"], tmp_path)
    assert ended.code == 0, ended.output
    assert read_best(tmp_path).step == 2


def test_what_cannot_be_kept_is_said_once(nursery: Nursery, tmp_path: Path) -> None:
    script = """
from jackline.session.attach import attach
class Stream:
    position = 0
    def __iter__(self): return self
    def __next__(self): self.position += 1; return self.position
    def state_dict(self): return {"position": self.position}
    def load_state_dict(self, state): self.position = state["position"]
with jackline.attach(**settings, loader=Stream(), keep_best="val") as run:
    for batch in run.steps(total=9):
        if run.step % 3 == 0: run.log(val=measure(run))
        train()
"""
    ended = nursery.run(HEAD + script, ["top"], tmp_path)
    assert ended.code == 0, ended.output
    assert ended.output.count("is not kept as the best") == 1, ended.output
    assert not (tmp_path / "runs" / "x" / "checkpoints" / "best").exists()


def test_a_number_that_is_never_logged_is_named(nursery: Nursery, tmp_path: Path) -> None:
    script = """
with jackline.attach(**settings, keep_best="vall") as run:
    for batch in run.steps(total=3):
        train()
        run.log(val=1.0)
"""
    ended = nursery.run(HEAD + script, ["x"], tmp_path)
    assert ended.code == 0, ended.output
    assert (
        "keep_best='vall': no number of that name was logged (there is val), so no checkpoint is the best"
        in ended.output
    )


def test_of_equals_the_oldest_is_the_best() -> None:
    metrics: dict[Name, dict[str, Any]] = {Name(5): {"val": 1.0}, Name(10): {"val": 1.0}, Name(15): {"val": 2.0}}
    assert best_checkpoint(metrics, "val") == Name(5)
    assert best_checkpoint(metrics, "+val") == Name(15)

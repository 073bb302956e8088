"""`replay_every=` and `on_spike="rewind"` of an attached loop and a recipe, with real processes and kill -9."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from jackline.errors import UsageError
from jackline.review.facts import read_facts
from jackline.rundir.jsonl import read_last
from jackline.rundir.layout import RunDir
from jackline.rundir.records.seen import read_skipped
from jackline.session.driver import Driver
from jackline.trainer.own.samples import Order, SampleLoader, Samples
from tests.session.nursery import EVERY_SAVE, Ended, Nursery

# Batch 30 has a sample that makes the loss jump; checkpoints every 5 steps.
SCRIPT = """
import hashlib, os, signal, torch, jackline
from jackline.session import strange
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
given = torch.randn(200, 3)
wanted = given.sum(1, keepdim=True)
if "HEALTHY" not in os.environ:
    wanted[[int(one) for one in os.environ.get("BAD", "122").split()]] = float(os.environ.get("VALUE", "1e4"))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(given, wanted), batch_size=4)
settings = {name: int(os.environ[name]) for name in ("replay_every",) if name in os.environ}
if "KILL_BETWEEN" in os.environ:
    strange.add_skip = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

def loss_of(part):
    given, wanted = part
    return (model(given) - wanted).square().sum(), len(given)

with jackline.attach(name="one", model=model, optimizer=optimizer, loader=loader, save_every_steps=5,
                     on_spike=os.environ.get("ON_SPIKE", "continue"), **settings) as run:
    for batch in run.steps(total=45):
        run._attached.saver.wait()
        optimizer.zero_grad()
        if "PLAIN" in os.environ:
            total, count = loss_of(batch)
            loss = total / count
            loss.backward()
        else:
            loss = run.safe_step(loss_of, batch).loss
        optimizer.step()
        run.log(loss=loss)
        print("trained", run.step, int(run.batch), flush=True)
        if run.step == int(os.environ.get("KILL_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
print("weights", hashlib.sha256(b"".join(w.detach().numpy().tobytes() for w in model.parameters())).hexdigest())
"""
REWIND = {**EVERY_SAVE, "ON_SPIKE": "rewind"}


def weights(ended: Ended) -> str:
    found = re.search(r"weights (\w+)", ended.output)
    assert found, ended.output
    return found[1]


def to_the_end(nursery: Nursery, folder: Path, env: dict[str, str], at_most: int = 6) -> Ended:
    for _ in range(at_most):
        ended = nursery.run(SCRIPT, [], folder, env)
        if ended.code == 0:
            return ended
        assert ended.code == 75, ended.output
    raise AssertionError(ended.output)


def events(run: RunDir, kind: str) -> list[dict[str, object]]:
    return [line for line in read_last(run.session_events(0), 500) if line.get("event") == kind]


def test_a_bad_batch_is_named_with_its_samples_and_a_plain_loop_is_told_the_way(
    tmp_path: Path, nursery: Nursery
) -> None:
    ended = nursery.run(SCRIPT, [], tmp_path, {"replay_every": "10"})
    assert ended.code == 0, ended.output
    (told,) = events(RunDir(tmp_path / "runs/one"), "alarm")
    assert told["verdict"] == "data or mathematics" and told["batch"] == 30 and told["step"] == 31
    assert (
        "batch 30 of the run, samples 120, 121, 122, 123. `jackline resume one --step N --skip-batches 30:31`"
        in str(told["text"])
    )
    (tmp_path / "plain").mkdir()
    plain = nursery.run(SCRIPT, [], tmp_path / "plain", {"replay_every": "10", "PLAIN": "1"})
    assert plain.code == 0 and "replay_every=10: no step is done again" in plain.output, plain.output
    (tmp_path / "off").mkdir()
    off = nursery.run(SCRIPT, [], tmp_path / "off", {})
    assert "no step is done again" not in off.output and weights(off) == weights(ended)


def test_a_spike_is_gone_back_behind_and_a_kill_at_any_time_changes_nothing(tmp_path: Path, nursery: Nursery) -> None:
    folders = {name: tmp_path / name for name in ("whole", "killed", "between", "before")}
    for folder in folders.values():
        folder.mkdir()
    first = nursery.run(SCRIPT, [], folders["whole"], REWIND)
    assert first.code == 75 and "batches 25:31 of the run are left out" in first.output, first.output
    assert "(on_spike=rewind, 1 of at most 3)" in first.output
    second = nursery.run(SCRIPT, [], folders["whole"], REWIND)
    assert second.code == 0, second.output
    assert "left out: the batches 25:31 of the run (on_spike: loss " in second.output
    assert "left out the batches 25 to 30, as on_spike=rewind says" in second.output
    assert re.findall(r"trained (\d+) (\d+)", second.output)[0] == ("26", "31")
    run = RunDir(folders["whole"] / "runs/one")
    (skip,) = read_skipped(run).rewinds
    assert str(skip) == "25:31" and skip.step == "step-00000025" and str(skip.why).startswith("loss ")
    facts = read_facts(run)["rewinds"]
    assert facts["batches left out"] == "25:31" and facts["went back to step 25"].startswith("on_spike: loss ")
    assert "went back to step 25, without the batches 25:31 (on_spike: loss " in second.output
    assert "on_spike=rewind has gone back 1 of at most 3 times" in second.output
    assert len(events(run, "rewound")) >= 2
    # Killed in the redone part, and after it.
    assert nursery.run(SCRIPT, [], folders["killed"], REWIND).code == 75
    for at in ("28", "41"):
        assert nursery.run(SCRIPT, [], folders["killed"], {**REWIND, "KILL_AT": at}).code == -9
    assert weights(nursery.run(SCRIPT, [], folders["killed"], REWIND)) == weights(second)
    # Killed between the two files of a rewind: the same spike comes again.
    assert nursery.run(SCRIPT, [], folders["between"], {**REWIND, "KILL_BETWEEN": "1"}).code == -9
    assert not read_skipped(RunDir(folders["between"] / "runs/one")).ranges
    assert weights(to_the_end(nursery, folders["between"], REWIND)) == weights(second)
    # Killed in the step before the spike.
    assert nursery.run(SCRIPT, [], folders["before"], {**REWIND, "KILL_AT": "30"}).code == -9
    assert weights(to_the_end(nursery, folders["before"], REWIND)) == weights(second)


def test_three_rewinds_are_all_and_the_default_makes_none(tmp_path: Path, nursery: Nursery) -> None:
    """Four bad batches, far enough apart that each is a spike of its own; a NaN counts too."""
    (tmp_path / "plain").mkdir()
    env = {**REWIND, "BAD": "84 122 142 176", "VALUE": "nan"}
    outputs = []
    for _ in range(4):
        ended = nursery.run(SCRIPT, [], tmp_path, env)
        outputs.append(ended)
        if ended.code == 0:
            break
    assert [ended.code for ended in outputs] == [75, 75, 75, 0], outputs[-1].output
    assert "on_spike=rewind has gone back 3 times and does not again" in outputs[-1].output
    assert len(read_skipped(RunDir(tmp_path / "runs/one")).rewinds) == 3
    plain = nursery.run(SCRIPT, [], tmp_path / "plain", EVERY_SAVE)
    assert plain.code == 0 and not read_skipped(RunDir(tmp_path / "plain/runs/one")).ranges


RECIPE = """
import os, torch, jackline
from torch import nn

class Mine(jackline.Recipe):
    batch_size = 4
    max_steps = 40
    save_every_steps = 5
    eval_every = 0

    def make_model(self):
        return nn.Linear(3, 1)

    def train_data(self):
        given = torch.randn(200, 3)
        wanted = given.sum(1, keepdim=True)
        wanted[int(os.environ["BAD"])] = float(os.environ["VALUE"])
        return given, wanted

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()
"""
TRAINING = Path(__file__).parents[1] / "trainer" / "own_training.py"


@pytest.mark.parametrize("value", ["1e4", "nan"])
def test_a_recipe_goes_back_and_a_replay_names_the_samples(value: str, tmp_path: Path, nursery: Nursery) -> None:
    samples = Samples((torch.zeros(200, 3), torch.zeros(200, 1)), None, name="x", seed=1)
    order = iter(SampleLoader(samples, Order(4, 1, 0, 0), pin_memory=False))
    windows = [list(next(order).windows) for _ in range(27)][26]
    (tmp_path / "mine.py").write_text(RECIPE)
    run = RunDir(tmp_path / "runs" / "one")
    words = [str(run.path), "mine.py", "seed=1", "rehearse=no", "full_eval=no", "on_spike=rewind", "replay_every=10"]
    env = {**EVERY_SAVE, "BAD": str(windows[1]), "VALUE": value}
    first = nursery.run(TRAINING, words, tmp_path, env)
    assert first.code == 75, first.output
    assert f"batch 26 of the run, samples {', '.join(map(str, windows))}." in first.output, first.output
    assert "data or mathematics" in first.output and "are left out from now on (on_spike=rewind, 1 of" in first.output
    second = nursery.run(TRAINING, words, tmp_path, env)
    assert second.code == 0, second.output
    (skip,) = read_skipped(run).rewinds
    assert str(skip) == "25:27" and "on_spike: loss" in second.output


def test_a_framework_that_owns_its_loop_refuses_them() -> None:
    for settings in ({"replay_every": 10}, {"on_spike": "rewind"}):
        with pytest.raises(UsageError, match="need a loop whose steps and batches Jackline hands out"):
            Driver(name="x", **settings)

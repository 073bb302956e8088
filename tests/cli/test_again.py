"""Longer, again, with other settings: resume with changes, fork, sweep, as a person types them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.cli.models.again import is_setting, receipt
from jackline.cli.models.sweep import grid, values_of
from jackline.cli.models.together import Limits, Memory, may_start
from jackline.errors import UsageError
from jackline.rundir.kin import FORKED, as_tree
from jackline.trainer.config import TrainConfig, identity
from jackline.trainer.optim.schedule import describe_schedule, key_points, lr_at, schedule_of
from tests.shell import Shell

# Torch is imported inside, so that reading the settings takes a tenth of a second.
RECIPE = """
import jackline


class Line(jackline.Recipe):
    batch_size = 4
    max_steps = 6
    lr = 0.1
    save_every_steps = 2
    rehearse = False

    def make_model(self):
        from torch import nn
        return nn.Linear(3, 1)

    def train_data(self):
        import torch
        return torch.randn(40, 3)

    def loss(self, model, batch):
        return model(batch).square().mean()
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    found.env.update(OMP_NUM_THREADS="1", JACKLINE_TEST_EVERY_SAVE="1")
    found.script("line.py", RECIPE)
    yield found
    found.close()


def rates(shell: Shell, name: str) -> dict[int, float]:
    lines = map(json.loads, (shell.runs / name / "metrics-0.jsonl").read_text().splitlines())
    return {line["step"]: round(line["lr"], 6) for line in lines if "lr" in line}


@pytest.mark.slow  # four trainings under a supervisor
def test_a_finished_run_gets_more_steps_a_fork_another_rate_and_a_sweep_skips_what_is_done(shell: Shell) -> None:
    first = shell.jackline("train", "line.py")
    assert first.code == 0, first
    name = re.search(r"run '(line-\w+)', attempt 1", first.err + first.out)
    assert name is not None, first
    run = name[1]
    done = shell.jackline("resume", run)
    assert done.code == 2 and "more steps: jackline resume RUN max_steps=N" in done.err
    same = shell.jackline("resume", run, "max_steps=6")
    assert same.code == 2 and "has done 6 steps, and max_steps=6" in same.err
    wrong = shell.jackline("resume", run, "max_stps=9")
    assert wrong.code == 2 and "did you mean 'max_steps'?" in wrong.err

    more = shell.jackline("resume", run, "max_steps=12", "--restart-schedule")
    assert more.code == 0, more
    said = "the schedule begins anew at step 6, for 6 steps: the learning rate is 0 -> 0.1 at step 6"
    assert said in more.err + more.out
    assert "continuing with a change: max_steps: 6 -> 12" in more.err + more.out
    assert rates(shell, run)[7] == 0.1 and rates(shell, run)[12] == 0.0

    forked = shell.jackline("fork", run, "--step", "6", "lr=0.2", "batch_size=8", "schedule=constant")
    assert forked.code == 0, forked
    assert "batch_size 4 -> 8 from step 6 on" in forked.err + forked.out
    fork = f"{run}-fork"
    assert set(rates(shell, fork).values()) == {0.2} and min(rates(shell, fork)) == 7 and 12 in rates(shell, fork)
    contents = json.loads((shell.runs / fork / "run.json").read_text())
    assert contents["settings"][FORKED] == f"{run} at step 6"
    shown = shell.jackline("runs").out
    assert re.search(rf"^{run} .*\n└ {fork} ", shown, re.M), shown
    assert shell.jackline("fork", run, "--step", "5").err.startswith(
        f"error: run '{run}' has no checkpoint of step 5"
    )

    plan = shell.jackline("sweep", "line.py", "seed=0,1", "lr=0.1", "--dry-run")
    assert plan.code == 0 and re.search(r"^0 +other settings .*\n1 +not begun", plan.out, re.M), plan
    swept = shell.jackline("sweep", "line.py", "max_steps=12", "schedule_start=6", "seed=0..1", "--at-once", "2")
    assert swept.code == 0, swept
    assert f"has finished, as run '{run}'" in swept.err
    assert re.search(rf"^0 +finished +12 +\d\.\d+ +- +{run}$", swept.out, re.M), swept.out
    assert re.search(r"^1 +finished +12 +\d\.\d+ +- +line-\w+$", swept.out, re.M), swept.out


def config_of(**words: object) -> TrainConfig:
    return TrainConfig(data="x", **words)  # type: ignore[arg-type]


def test_a_schedule_that_begins_anew_is_that_of_the_rest() -> None:
    words = {"max_steps": 40, "lr": 0.1, "min_lr": 0.01, "warmup_steps": 3}
    whole = schedule_of(config_of(**words))
    later = schedule_of(config_of(**{**words, "max_steps": 100, "schedule_start": 60}))
    assert [lr_at(step, whole) for step in range(40)] == [lr_at(60 + step, later) for step in range(40)]
    assert describe_schedule(later).startswith("cosine (begun anew at step 60): 3 steps of warm-up to 0.1")
    assert "0.01 at step 99" in describe_schedule(later)
    assert [point.step for point in key_points(later)] == [60, 63, 80, 99]
    with pytest.raises(UsageError, match="schedule_start=40 is not before the last step"):
        schedule_of(config_of(**{**words, "schedule_start": 40}))
    assert "schedule_start" not in identity(config_of(**words))  # runs of before keep their names


def test_the_receipt_says_what_a_change_means() -> None:
    before = {"lr": 0.1, "min_lr": 0.0, "schedule": "cosine", "warmup_steps": 0, "decay_steps": 0, "max_steps": 10}
    assert receipt({**before, "seed": 1}, {**before, "seed": 2}, 5) == []
    assert receipt(before, {**before, "lr": 0.2}, 5) == ["the learning rate is 0.0587 -> 0.0826 at step 5"]
    longer = receipt(before, {**before, "max_steps": 20}, 10)
    assert longer[0].startswith("the cosine schedule is now that of a run of 20 steps: ")
    assert "the learning rate is 0 -> 0.0459 at step 10" in longer[0]
    assert "--restart-schedule" in longer[1]
    assert receipt({**before, "epochs": 3}, {**before, "epochs": 4}, 5) == [
        "the schedule is that of the new number of epochs"
    ]


def test_words_that_are_settings() -> None:
    assert is_setting("lr=1e-4") and is_setting("max-steps=3")
    assert not is_setting("runs/a=b") and not is_setting("s3://place?x=y") and not is_setting("demo-3f2a91")


def test_one_more_training_starts_if_memory_and_cores_allow_it() -> None:
    def allowed(running: str, *, gpu: int = 0, free: int = 10, peak: int | None = 2, **limits: object) -> bool:
        memory = Memory(gpu, free, peak)
        return may_start("new", running.split(), Limits(**{"num_cores": 4, **limits}), memory)  # type: ignore[arg-type]

    assert allowed("", free=0, peak=None), "one in any case"
    assert allowed("a", number=2) and not allowed("a b", number=2)
    assert allowed("a b c") and not allowed("a b c d"), "not more than cores"
    assert allowed("a", free=3) and not allowed("a", free=2), "the most that one has needed, and a reserve"
    assert not allowed("a", peak=None), "what it needs has not been seen yet"
    needs = {"a": 30, "b": 30, "new": 20}
    assert allowed("a b", gpu=80, needs=needs) and not allowed("a b", gpu=79, needs=needs)
    assert not allowed("c", gpu=80, needs=needs), "one that was not planned has the GPU to itself"
    assert not allowed("a", gpu=80, needs=needs, free=1), "host memory counts on a GPU too"


@pytest.mark.slow  # three trainings under a supervisor
def test_a_sweep_trains_as_many_at_once_as_fit(shell: Shell) -> None:
    swept = shell.jackline("sweep", "line.py", "seed=1..3", "max_steps=40", "device=cpu", "--at-once", "auto")
    assert swept.code == 0, swept
    assert len(re.findall(r"^[123] +finished +40 ", swept.out, re.M)) == 3, swept
    assert swept.err.count(": started; ") == 3 and swept.err.count(": finished") == 3, swept


def test_the_grid_of_a_sweep() -> None:
    names, rows = grid(["lr=1e-3,3e-4", "--quick", "seed=1..3"])
    assert names == ("lr", "seed") and len(rows) == 6
    assert rows[0] == (("--quick", "lr=1e-3", "seed=1"), ("1e-3", "1"))
    assert values_of("3..1") == ["3", "2", "1"] and values_of("2,2") == ["2"] and values_of("a..b") == ["a..b"]
    for wrong in (["lr=1e-3"], ["lr=1,,2"], ["seed=1..1000"], ["a=1..100", "b=1..100"]):
        with pytest.raises(UsageError):
            grid(wrong)


def test_forks_follow_the_run_they_come_from_and_forged_ones_are_shown_too() -> None:
    def run(path: str, parent: str = "") -> tuple[Path, str, str]:
        return Path("runs", path), f"{parent} at step 3" if parent else "", path

    views = [run("c", "b"), run("x"), run("b", "a"), run("a"), run("lost", "gone"), run("self", "self")]
    assert as_tree(views) == [(0, "x"), (0, "a"), (1, "b"), (2, "c"), (0, "lost"), (0, "self")]
    assert sorted(as_tree([run("p", "q"), run("q", "p")])) == [(0, "p"), (0, "q")]
    twice = [run("here/a"), run("here/b", "a"), run("there/a"), run("there/b", "a")]  # a fork is beside its run
    assert as_tree(twice) == [(0, "here/a"), (1, "here/b"), (0, "there/a"), (1, "there/b")]

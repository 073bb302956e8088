"""Host memory of an attached loop under a real limit: it saves, exits with 75, continues with less; or is ended."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from jackline.memory.guard.host import HostGuard
from jackline.rundir.intent import write_intent
from jackline.rundir.layout import RunDir
from jackline.session.feeds.choose import choose_feed
from jackline.session.memory.host import HostMemory, SaveCost, loading_of, settings_to_start_with, use_less
from jackline.session.settings import Settings
from tests.deadline import HANGS_S
from tests.memory.test_host_guard import Growing
from tests.places import Unavailable, memory_cgroup
from tests.session.nursery import ROOT

SCRIPT = """
import os, resource, time, torch, jackline
is_first = os.environ["JACKLINE_ATTEMPT"] == "1"
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4000, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
if "CGROUP" in os.environ:
    with open(os.environ["CGROUP"], "w") as file:
        file.write(str(os.getpid()))
else:
    used = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData")][0]
    resource.setrlimit(resource.RLIMIT_DATA, (used + (800 << 20), resource.RLIM_INFINITY))
eaten = []

def eat():
    time.sleep(0.04)
    eaten.append([str(number) * 12 for number in range(60_000)])  # HERE

with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=5, overlap=False) as run:
    for (batch,) in run.steps(total=300 if is_first else run.step + 20):
        optimizer.zero_grad(); model(batch).square().mean().backward(); optimizer.step()
        if is_first and run.step > 10:
            eat()
        while is_first and run.step > 20 and "ENDLESS" in os.environ:
            eat()
print("done", flush=True)
"""


def jackline(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JACKLINE_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state"), **more}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "jackline", *words]
    return subprocess.run(command, env=env, cwd=folder, text=True, capture_output=True, timeout=HANGS_S)


@contextlib.contextmanager
def limited(kind: str) -> Iterator[dict[str, str]]:
    """The environment that puts the script under a limit."""
    if kind == "rlimit":
        yield {}
        return
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory_cgroup("800M"))
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield {"CGROUP": str(group / "cgroup.procs")}


def attempt_file(folder: Path, number: int, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / "eater" / "attempts" / f"{number:03d}" / name).read_text())


@pytest.mark.parametrize("kind", ["cgroup", pytest.param("rlimit", marks=pytest.mark.slow)])
def test_a_loop_that_fills_memory_saves_leaves_with_75_and_resumes_with_fewer_workers(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with limited(kind) as env:
        done = jackline(tmp_path, "run", "--name", "eater", "--", sys.executable, "train.py", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    ending, intent = attempt_file(tmp_path, 1, "exit.json"), attempt_file(tmp_path, 1, "intent.json")
    assert (ending["exit_code"], ending["signal"], ending["cause"]) == (75, None, "stopped")
    assert intent["restart"] is True
    num_workers = intent["settings"]["num_workers"]
    assert num_workers in (0, 1)  # halved again when there was time to warn first
    assert intent["why"].startswith("host RAM: ") and intent["why"].endswith(", saved")
    assert f"next with num_workers={num_workers}, prefetch=1" in done.stderr
    assert f"[jackline] reading with {num_workers} instead of 2 workers" in done.stdout
    assert ": the attempt before ran out of host memory" in done.stdout
    assert "done" in done.stdout.splitlines()
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if text.endswith("# HERE"))
    told = jackline(tmp_path, "why", "eater", "--attempt", "1").stdout
    assert "it saved and exited after" in told
    assert f"train.py:{line}" in told


@pytest.mark.slow
def test_a_step_that_never_ends_is_ended_before_the_kernel_does_it_and_continues(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with limited("cgroup") as env:
        done = jackline(tmp_path, "run", "--name", "eater", "--", sys.executable, "train.py", ENDLESS="1", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    ending = attempt_file(tmp_path, 1, "exit.json")
    assert (ending["cause"], ending["signal"]) == ("memory_guard", 9)
    assert ending["evidence"]["oom_kills_in_cgroup"] in (0, None)
    assert "no step ends: ended before the kernel kills; " in done.stderr
    assert "reading with 1 instead of 2 workers" in done.stdout
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if text.endswith("# HERE"))
    assert f"train.py:{line}" in ending["text"]


# -- the parts -----------------------------------------------------------------------------------------------------


def make_feed(num_workers: int = 2, **more: Any) -> Any:
    loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=4, num_workers=num_workers, prefetch_factor=4)
    return choose_feed(loader, Settings(**more), print)


def test_fewer_workers_give_the_same_batches_from_where_it_was() -> None:
    feed = make_feed()
    feed.open(0, 0)
    before = [feed.take()[0].tolist() for _ in range(3)]
    assert use_less(feed, {"num_workers": 0, "prefetch": 1}, can_change_workers=True) == (
        "reading with 0 instead of 2 workers"
    )
    assert loading_of(feed)[0] == 0
    feed.open(0, 3)
    after = [feed.take()[0].tolist() for _ in range(13)]
    whole = make_feed()
    whole.open(0, 0)
    assert before + after == [whole.take()[0].tolist() for _ in range(16)]


def test_augmentation_that_depends_on_the_workers_keeps_them() -> None:
    feed = make_feed(keyed_random=False)
    assert use_less(feed, {"num_workers": 1, "prefetch": 1}, can_change_workers=True) == ""
    assert loading_of(feed) == (2, 4)


def test_more_is_never_made_of_less() -> None:
    feed = make_feed()
    assert use_less(feed, {"num_workers": 8, "prefetch": 9}, can_change_workers=True) == ""


def guarded(rate: float) -> tuple[HostMemory, list[str]]:
    told: list[str] = []
    guard = HostGuard(read=Growing(rate))
    return HostMemory(make_feed(), lambda _, text, **__: told.append(text), lambda: told.append("again"), guard), told


def test_a_line_that_sleeps_is_named_only_where_no_other_was_seen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("time.sleep(0.04)\nrows.append(row)\n")
    memory, _ = guarded(0.0)
    memory._places[str(script), 1, "eat"] += 5
    assert memory.where() == f"; it grows at {script}:1 `time.sleep(0.04)`"
    memory._places[str(script), 2, "eat"] += 1
    assert memory.where() == f"; it grows at {script}:2 `rows.append(row)`"


def test_a_frame_without_a_line_is_passed_over_and_its_caller_is_named(tmp_path: Path) -> None:
    """A frame that is just being entered has no line yet. Once that ended the guard: the line was asked for its text.

    Nothing to wait for: the function has no line at all, so every look finds the frame in that state.
    """
    memory, _ = guarded(0.0)
    script = tmp_path / "train.py"
    script.write_text("def entered():\n    look()\n\nentered()\n")
    names: dict[str, Any] = {"look": memory._look}
    exec(compile("def entered():\n    look()\n", str(script), "exec"), names)
    names["entered"].__code__ = names["entered"].__code__.replace(co_linetable=b"")
    exec(compile("\n\n\nentered()\n", str(script), "exec"), names)
    assert memory.where() == f"; it grows at {script}:4 `entered()`"


def test_a_line_that_cannot_be_named_costs_the_words_and_not_the_guard() -> None:
    memory, _ = guarded(50e6)

    def fail() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    memory._frame = fail  # type: ignore[method-assign, assignment]
    leave = None
    for number in range(10_000):
        memory.guard._sample()
        memory.guard.is_calm = lambda: False  # type: ignore[method-assign]
        leave = memory.mind(number * 0.1, lambda: SaveCost(1.0, 0))
        if leave is not None:
            break
    assert leave is not None and leave.why.startswith("host RAM: ")
    assert "it grows at" not in leave.why


def test_it_warns_and_gives_back_first_and_leaves_with_what_it_has_learnt() -> None:
    memory, told = guarded(50e6)
    for number in range(10_000):
        memory.guard._sample()
        memory.guard.is_calm = lambda: False  # type: ignore[method-assign]
        leave = memory.mind(number * 0.1, lambda: SaveCost(1.0, 0))
        if leave is not None:
            break
    assert leave is not None and leave.why.startswith("host RAM: ")
    assert told[0].endswith(
        "giving back what is free and reading with 1 instead of 2 workers and 2 instead of 4 batches read ahead by"
        " each"
    )
    assert told[1] == "again"
    assert leave.settings["num_workers"] == 0
    assert memory.leaving is leave


def test_what_the_attempts_before_learnt_is_what_the_next_starts_with(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number in range(1, 5):
        run.attempt(number).path.mkdir(parents=True)
    assert settings_to_start_with(run, run.attempt(1), 8, 100) == {}
    write_intent(run.attempt(1), restart=True, why="host RAM", settings={"num_workers": 4, "limit_bytes": 100})
    assert settings_to_start_with(run, run.attempt(2), 8, 100) == {"num_workers": 4, "limit_bytes": 100}
    run.attempt(2).exit_file.write_text('{"cause": "kernel_oom"}')
    assert settings_to_start_with(run, run.attempt(3), 8, 100)["num_workers"] == 2
    write_intent(run.attempt(3), restart=False, why="Ctrl-C")
    assert settings_to_start_with(run, run.attempt(4), 8, 110)["num_workers"] == 2
    assert settings_to_start_with(run, run.attempt(4), 8, 200) == {}

"""What people do without having read a word: each ends in a clear error before step 1, or training continues."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadline import HANGS_S
from tests.session.nursery import Nursery
from tests.session.test_attach import HEAD, final, killed_and_whole

LOOP = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=2, name="x") as run:
    for batch in run.steps(total=9): run.log(loss=train(batch)); die_at(5)
show()
"""
ERRORS = {
    "moved after attach": (
        LOOP.replace("    for", "    model.double()\n    for"),
        "error: model.0.weight has changed since attach(): float32[8, 4] on cpu -> float64[8, 4] on cpu\n"
        "hint: build, convert and move the model first, and attach it as it will train\n",
    ),
    "another head after attach": (
        LOOP.replace("    for", "    model[2] = torch.nn.Linear(8, 3)\n    for"),
        "error: model.2.weight has changed since attach(): float32[1, 8] on cpu -> float32[3, 8] on cpu\n"
        "hint: build, convert and move the model first, and attach it as it will train\n",
    ),
    "a generator as loader": (
        "loader = ([torch.randn(3, 4)] for _ in range(4))" + LOOP,
        "error: the data gave no batch in epoch 1, at step 4\n"
        "hint: data that can be read once only (a generator) cannot be read again; ask for fewer steps\n",
    ),
    "two loaders": (
        "loader = {'a': loader, 'b': make_loader()}" + LOOP,
        "error: loader is a collection of loaders\nhint: attach one loader; keep the others outside\n",
    ),
    "no loader at all": (
        "loader = 7" + LOOP,
        "error: loader is a int, which cannot be iterated\n",
    ),
    "without `with`": (
        LOOP.replace("with jackline", "run = jackline").replace(" as run:", "").replace("    for", "for"),
        'error: this run is not open\nhint: with jackline.attach(...) as run: ... and use `run` inside the block\n',
    ),
    "forked after attach": (
        LOOP.replace("    for", "    if os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n    for"),
        "error: this process was forked from the one that is attached to run 'x'\n"
        "hint: fork first, and attach() in the process that trains\n",
    ),
    "a vector logged": (
        LOOP.replace("loss=train(batch)", "loss=batch[0]"),
        "error: log(loss=...) has 40 numbers\nhint: log(loss=value.mean())\n",
    ),
    "runs in a file": (
        'open("file", "w").close()' + LOOP.replace('name="x"', 'name="x", runs_dir="file/runs"'),
        "/file/runs: Not a directory\nhint: choose another place: attach(runs_dir=...) or $JACKLINE_RUNS\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ERRORS)
def test_a_mistake_is_named_with_what_to_do(what: str, nursery: Nursery, tmp_path: Path) -> None:
    script, words = ERRORS[what]
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 1
    assert words in ended.output
    assert not re.search(r"^final", ended.output, re.MULTILINE)


@pytest.mark.parametrize("what", ["two loaders", "no loader at all"])
def test_what_is_refused_at_once_leaves_no_run(what: str, nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(HEAD + ERRORS[what][0], [], tmp_path).code == 1
    assert not (tmp_path / "runs").exists()


# -- odd things that work -------------------------------------------------------------------------------------------

ODD = {
    "a dataset without a length, with a sampler": """
class NoLength(torch.utils.data.Dataset):
    def __getitem__(self, index): return (torch.full((4,), float(index)),)
loader = torch.utils.data.DataLoader(NoLength(), sampler=range(30), batch_size=5)
"""
    + LOOP,
    "a lambda for collate, in a worker": """
loader = make_loader(collate_fn=lambda samples: [torch.stack([one for (one,) in samples])], num_workers=1)
"""
    + LOOP,
    "tensors among the values": """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1, name="x", best=1.0) as run:
    for batch in run.steps(total=9):
        loss = train(batch)
        run.values["best"] = torch.minimum(loss, torch.as_tensor(run.values["best"]))
        run.values["all"] = [*run.values.get("all", []), loss]
        die_at(5)
print("final", run.step, run.values["best"].item().hex(), [one.item().hex() for one in run.values["all"]])
""",
    "weights changed behind the optimizer's back": """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1, name="x") as run:
    for batch in run.steps(total=25):
        with torch.no_grad(): model[0].weight.mul_(0.99)
        train(batch)
        if run.step in (5, 10, 15): settle()
        die_at(17)
show()
""",
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_odd_loops_go_on_exactly(what: str, nursery: Nursery, tmp_path: Path) -> None:
    found, wanted, output = killed_and_whole(nursery, ODD[what], tmp_path)
    assert found == wanted
    assert "resuming from step-" in output


def test_losses_that_are_no_numbers_are_written_so_that_json_can_be_read(nursery: Nursery, tmp_path: Path) -> None:
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, name="x", save_every_steps=1,
                     keep_best="loss") as run:
    for batch in run.steps(total=6):
        train(batch)
        run.log(loss=torch.tensor(float("nan")), norm=float("inf"), other=np.float32("nan"), count=np.int64(3))
show()
"""
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 0, ended.output
    assert "checkpoints are off" not in ended.output and "cannot be written" not in ended.output

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    run = tmp_path / "runs" / "x"
    lines = [json.loads(line, parse_constant=refuse) for line in (run / "metrics-0.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["norm"], line["other"], line["count"]) for line in lines] == [
        (step, "nan", "inf", "nan", 3) for step in range(1, 7)
    ]
    state = json.loads((run / "session-0.json").read_text(), parse_constant=refuse)
    assert state["metrics"]["loss"] is None
    assert state["last_checkpoint"]["step"] == 6


def test_workers_that_are_spawned_give_the_same_samples_as_none(nursery: Nursery, tmp_path: Path) -> None:
    script = """
import os, random, sys
import numpy as np, torch, jackline
class Noisy(torch.utils.data.Dataset):
    def __init__(self): self.rng = np.random.default_rng(1)
    def __len__(self): return 12
    def __getitem__(self, index): return index + random.random() + torch.rand(()).item() + self.rng.random()
if __name__ == "__main__":
    how = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True} if sys.argv[1:] else {}
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=3, shuffle=True, **how)
    with jackline.attach(loader=loader, seed=4) as run:
        print("final", [value.hex() for batch in run.steps(total=8) for value in batch.tolist()])
"""
    found = [nursery.run(script, arguments, tmp_path) for arguments in ([], ["spawn"])]
    assert [ended.code for ended in found] == [0, 0], found[1].output
    assert final(found[0].output) == final(found[1].output)


# -- surroundings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2])
def test_a_closed_descriptor_is_not_taken_for_a_file_of_ours(number: int, nursery: Nursery, tmp_path: Path) -> None:
    """`python train.py 2>&-`: the writer's socket became descriptor 2, and the receipt was written into it."""
    script = f"os.close({number})" + LOOP.replace("show()", 'open("done", "w").write(str(run.step))')
    assert nursery.run(HEAD + script, [], tmp_path).code == 0
    assert (tmp_path / "done").read_text() == "9"
    assert (tmp_path / "runs" / "x" / "checkpoints" / "step-00000009" / "manifest.json").exists()


def test_a_run_folder_that_is_deleted_stops_no_training(nursery: Nursery, tmp_path: Path) -> None:
    """Once the last line of the block was an error, and the program's own torch.save behind it never happened."""
    script = "import shutil" + LOOP.replace(
        "die_at(5)", 'run.step == 5 and shutil.rmtree("runs", ignore_errors=True)'
    )
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 0, ended.output
    assert "final 9 " in ended.output
    assert "[jackline] the end of this run cannot be written down (FileNotFoundError: " in ended.output


def test_a_forked_child_that_trains_on_takes_nothing_from_its_parent(nursery: Nursery, tmp_path: Path) -> None:
    """It once read the writer's answers, and the parent waited for them for ever."""
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1, name="x") as run:
    for batch in run.steps(total=12):
        train(batch); child = os.fork() if run.step == 5 else child if run.step > 5 else 0
    if child: os.wait()
print("child" if not child else "parent", run.step, flush=True)
if not child: os._exit(0)
show()
"""
    ended = nursery.start(HEAD + script, [], tmp_path).wait(HANGS_S)
    assert ended.code == 0, ended.output
    assert "child 12\n" in ended.output and "parent 12\n" in ended.output
    off = "[jackline] checkpoints are off: this is a forked child of the training process\n"
    assert ended.output.count(off) == 1
    assert (tmp_path / "runs" / "x" / "checkpoints" / "step-00000012").exists()


def test_a_reader_that_has_gone_away_does_not_matter(nursery: Nursery, tmp_path: Path) -> None:
    script = "near, far = os.pipe(); os.dup2(far, 2); os.close(near); os.close(far)" + LOOP
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert ended.code == 0
    assert "final 9 " in ended.output


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own: 100 MB, of which the engine keeps 64 MiB free."""
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_disk_that_fills_up_costs_checkpoints_and_no_training(nursery: Nursery, tmp_path: Path, disk: Path) -> None:
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1, name="x") as run:
    for batch in run.steps(total=20):
        run.log(loss=train(batch))
        settle()
        if run.step == 5 and os.environ.get("FILL"):
            with open(os.environ["FILL"], "wb", buffering=0) as file: os.posix_fallocate(file.fileno(), 0, 80_000_000)
        if run.step == 15 and os.environ.get("FILL"): os.unlink(os.environ["FILL"])
show()
"""
    runs = disk / "runs"
    ended = nursery.run(HEAD + script, [], tmp_path, {"FILL": str(disk / "filler"), "JACKLINE_RUNS": str(runs)})
    assert ended.code == 0, ended.output
    assert re.search(
        r"\[jackline\] step \d+ could not be saved: the disk is full \([\d.]+ MiB needed, [\d.]+ MiB free\); "
        r"training continues without this checkpoint\n",
        ended.output,
    ), ended.output
    whole = nursery.run(HEAD + script, [], tmp_path)
    assert final(ended.output) == final(whole.output)
    assert json.loads((runs / "x" / "session-0.json").read_text())["last_checkpoint"]["step"] == 20


def test_a_disk_that_cannot_be_written_is_named(nursery: Nursery, tmp_path: Path, disk: Path) -> None:
    runs = {"JACKLINE_RUNS": str(disk)}
    assert nursery.run(HEAD + LOOP, [], tmp_path, {**runs, "DIE": "1"}).code == -9
    deadline_s = time.monotonic() + HANGS_S
    while subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode:
        assert time.monotonic() < deadline_s, "the dead attempt's writer never let the disk go"
        time.sleep(0.1)
    ended = nursery.run(HEAD + LOOP, [], tmp_path, runs)
    hint = "hint: choose another place: attach(runs_dir=...) or $JACKLINE_RUNS\n"
    assert f"error: cannot write to {disk}/x: the disk is read-only\n{hint}" in ended.output
    ended = nursery.run(HEAD + LOOP.replace('"x"', '"y"'), [], tmp_path, runs)
    assert f"error: cannot make a run in {disk}: Read-only file system\n{hint}" in ended.output

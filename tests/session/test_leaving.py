"""Every way out of the loop: what is saved and said, the exit code, and that the next start continues exactly."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.session.nursery import EVERY_SAVE, Ended, Nursery

LOOP = """
import os, random, signal, sys, threading, time
import torch
import jackline

torch.manual_seed(0)
how = sys.argv[1] if len(sys.argv) > 1 else ""
data = torch.randn(200, 4)
layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=10, shuffle=True)
first = not os.path.exists("again")
open("again", "w").close()


def leave(where):
    if not first or how != where or run.step < 12:
        return False
    print("leaving", where, flush=True)
    return True


def train(batch):
    global loss
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    if leave("exception before backward"):
        raise ValueError("no")
    loss.backward()
    if leave("KeyboardInterrupt in backward"):
        raise KeyboardInterrupt
    optimizer.step()
    if leave("exception between optimizer and scheduler"):
        raise ValueError("no")
    if leave("exit in the middle"):
        os._exit(7)
    if leave("fork in the middle"):
        if os.fork() == 0:
            sys.exit(5)
        os.wait()
    scheduler.step()


with jackline.attach(
    model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, name="x", save_every_steps=5,
    on_change={"arguments": "warn"},
) as run:
    for (batch,) in run.steps(total=30):
        if leave("break at the top"):
            break
        if leave("exception at the top"):
            raise ValueError("no")
        train(batch)
        run.log(loss=loss)
        if leave("break at the bottom"):
            break
        if leave("save and break"):
            run.save()
            how = "break at the top"
        if leave("SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        if leave("SIGINT"):
            os.kill(os.getpid(), signal.SIGINT)
        if leave("SIGINT twice"):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        if leave("SIGTERM twice"):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        if leave("asked and swallowed"):
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                assert run.should_stop
            except Exception:
                pass
    print("behind the loop", flush=True)
print("complete", run.step, sum(p.double().sum().item() for p in model.state_dict().values()).hex())
"""
MIDDLE = (
    r"left in the middle of a step: not saved; the checkpoint of step (\d+) of [\d.]+ s ago stands; \d steps? will"
)
REST = r"left between two steps, after step (\d+): saved"
STOPPED = r"{0}: stopped at step (12), saved"
# how: (exit code of the first attempt, what it says; the group is the step it resumes from)
WAYS = {
    "exception before backward": (1, MIDDLE),
    "KeyboardInterrupt in backward": (1, MIDDLE),
    "exception between optimizer and scheduler": (1, MIDDLE),
    "exception at the top": (1, REST),
    "break at the top": (0, REST),
    "break at the bottom": (0, MIDDLE),
    "save and break": (0, REST),
    "exit in the middle": (7, ""),
    "SIGTERM": (75, STOPPED.format("SIGTERM")),
    "SIGINT": (75, STOPPED.format("Ctrl-C")),
    "SIGINT twice": (1, MIDDLE),
    "SIGTERM twice": (75, "asked twice: ended in the middle of a step"),
    "asked and swallowed": (75, STOPPED.format("SIGTERM")),
}


@pytest.fixture(scope="module")
def wanted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> str:
    return complete(nursery.run(LOOP, [], tmp_path_factory.mktemp("whole")))


def complete(ended: Ended) -> str:
    assert ended.code == 0, ended.output
    found = re.findall(r"^complete 30 .*$", ended.output, re.MULTILINE)
    assert len(found) == 1, ended.output
    return found[0]


@pytest.mark.parametrize("how", WAYS)
def test_leaving_and_continuing_ends_as_if_nobody_had_left(
    how: str, nursery: Nursery, tmp_path: Path, wanted: str
) -> None:
    """No save is skipped: else a late one falls on the step at which the loop is left, and nothing is lost."""
    code, words = WAYS[how]
    ended = nursery.run(LOOP, [how], tmp_path, EVERY_SAVE)
    assert "leaving" in ended.output
    assert ended.code == code, ended.output
    said = re.search(words, ended.output)
    assert said, ended.output
    is_break = "break" in how
    assert ("behind the loop" in ended.output) == is_break, "code behind the loop runs only when it was left by break"
    assert ("complete" in ended.output) == is_break
    again = nursery.run(LOOP, [how], tmp_path, EVERY_SAVE)
    goes_on_from = re.search(r"resuming from step-0*(\d+)", again.output)
    assert goes_on_from, again.output
    if said.groups():
        assert said[1] == goes_on_from[1]
    assert complete(again) == wanted


def test_a_forked_child_that_leaves_the_block_ends_nothing(nursery: Nursery, tmp_path: Path, wanted: str) -> None:
    ended = nursery.run(LOOP, ["fork in the middle"], tmp_path)
    assert "leaving" in ended.output
    assert complete(ended) == wanted


def test_a_second_start_after_the_end_trains_nothing_and_has_the_final_weights(
    nursery: Nursery, tmp_path: Path, wanted: str
) -> None:
    assert complete(nursery.run(LOOP, [], tmp_path)) == wanted
    again = nursery.run(LOOP, [], tmp_path)
    assert complete(again) == wanted
    assert "resuming from step-00000030" in again.output


PHASES = """
import os, sys, time
import torch
import jackline

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Slow(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        mark("data")
        return torch.full((4,), float(index))


def mark(what):
    if sys.argv[1] == what and not os.path.exists("again") and (run.step >= 3 or what == "proof"):
        open("again", "w").close()
        print("now in", what, flush=True)
        while not run.should_stop:
            time.sleep(0.01)


class Meter:  # its state_dict is asked for in the proof, in every save and in the last one
    def state_dict(self):
        where = "save" if run.step == 14 else "last save" if run.step == 30 else ""
        mark("proof" if run.step == 0 else where)
        return {}
    def load_state_dict(self, state): pass


loader = torch.utils.data.DataLoader(Slow(), batch_size=4, shuffle=True)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, meter=Meter(), name="x", on_change="continue",
                     save_every_steps=14) as run:
    for epoch in run.epochs(3):
        mark("epoch start")
        for batch in run.steps():
            mark("body start")
            loss = model(batch / 40).square().mean()
            optimizer.zero_grad()
            loss.backward()
            mark("backward")
            optimizer.step()
            mark("after step")
            if run.step == 28:
                # The one that is due here is left out while the writer is still at the one of step 14, comes with
                # step 30 instead, and is not the last save then. One that is asked for waits for the writer.
                run.save()
            if run.step % 7 == 0:
                with run.phase("evaluate"):
                    mark("evaluate")
        mark("epoch end")
print("complete", run.step, model.weight.sum().item().hex())
"""


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> str:
    ended = nursery.run(PHASES, ["never"], tmp_path_factory.mktemp("undisturbed"))
    assert ended.code == 0, ended.output
    return ended.output.splitlines()[-1]


@pytest.mark.parametrize(
    "phase", ["proof", "data", "epoch start", "body start", "backward", "after step", "save", "evaluate", "epoch end"]
)
def test_sigterm_in_every_phase_stops_at_the_next_boundary(
    phase: str, nursery: Nursery, tmp_path: Path, undisturbed: str
) -> None:
    child = nursery.start(PHASES, [phase], tmp_path)
    child.wait_for(f"now in {phase}")
    child.signal(signal.SIGTERM)
    ended = child.wait()
    assert ended.code == 75, ended.output
    assert re.search(r"SIGTERM: stopped at step \d+, saved", ended.output), ended.output
    again = nursery.run(PHASES, [phase], tmp_path)
    assert again.code == 0, again.output
    assert again.output.splitlines()[-1] == undisturbed


def test_sigterm_in_the_last_save_does_not_undo_a_training_that_is_complete(
    nursery: Nursery, tmp_path: Path, undisturbed: str
) -> None:
    child = nursery.start(PHASES, ["last save"], tmp_path)
    child.wait_for("now in last save")
    child.signal(signal.SIGTERM)
    ended = child.wait()
    assert ended.code == 0, ended.output
    assert ended.output.splitlines()[-1] == undisturbed


def test_sigterm_before_the_block_ends_the_process_as_ever(nursery: Nursery, tmp_path: Path) -> None:
    script = "import os, signal, jackline\nrun = jackline.attach(best=1)\nos.kill(os.getpid(), signal.SIGTERM)\n"
    assert nursery.run(script, [], tmp_path).code == -signal.SIGTERM


GRACE = """
import os, signal, sys, threading, time
import torch
import jackline
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with jackline.attach(model=model, optimizer=optimizer, grace_s=1.0, save_every_steps=1) as run:
    for number in run.steps(total=5):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            heard = os.path.join(jackline_run_dir := os.path.join("runs", os.listdir("runs")[0]), "events-0.jsonl")
            while '"grace"' not in open(heard).read():
                time.sleep(0.02)
"""


def test_a_step_that_outlasts_the_grace_is_announced(nursery: Nursery, tmp_path: Path) -> None:
    ended = nursery.run(GRACE, [], tmp_path)
    assert ended.code == 75
    assert re.search(
        r"\[jackline\] SIGTERM came [\d.]+ s ago and this step has not ended; the grace is over after 1.0 s. "
        r"If it is killed, the checkpoint of step \d of [\d.]+ s ago stands; \d steps? will be repeated",
        ended.output,
    ), ended.output

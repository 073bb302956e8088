"""Loops whose steps torch does not report, whose optimizers start late, and loops that count for themselves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from jackline.errors import UsageError
from jackline.session.stepping import Stepper
from tests.session.nursery import EVERY_SAVE, Nursery
from tests.session.test_attach import HEAD, final

SAM = """
class SAM(torch.optim.Optimizer):
    def __init__(self, params, base=None, rho=0.05, **more):
        super().__init__(params, dict(rho=rho, **more))
        if base is not None:
            self.base = base(self.param_groups, **more)
            self.param_groups = self.base.param_groups
    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["e"] = group["rho"] * p.grad
                p.add_(self.state[p]["e"])
        self.zero_grad()
    @torch.no_grad()
    def second_step(self, zero=True):
        for group in self.param_groups:
            for p in group["params"]: p.sub_(self.state[p]["e"])
        if hasattr(self, "base"): self.base.step()
        else:
            for group in self.param_groups:
                for p in group["params"]: p.sub_(group["lr"] * p.grad)
        if zero: self.zero_grad()
    @torch.no_grad()
    def step(self, closure=None):
        self.first_step()
        with torch.enable_grad(): closure()
        self.second_step()
def loss_of(batch): return model(batch[0]).square().mean()
model = torch.nn.Linear(4, 1)
"""
SHAPES = {
    "SAM by hand": """
optimizer = SAM(model.parameters(), lr=0.1)
def train(batch):
    loss_of(batch).backward(); optimizer.first_step()
    loss_of(batch).backward(); optimizer.second_step()
""",
    "SAM around another": """
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
def train(batch):
    loss_of(batch).backward(); optimizer.first_step()
    loss_of(batch).backward(); optimizer.second_step()
""",
    "SAM by closure": """
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
def train(batch):
    loss_of(batch).backward()
    def again(): loss_of(batch).backward()
    optimizer.step(again)
""",
    "a wrapper that is no optimizer": """
class Wrapper:
    def __init__(self): self.inner, self.count = torch.optim.SGD(model.parameters(), lr=0.1), 0
    def step(self): self.count += 1; self.inner.step(); self.inner.zero_grad()
    def state_dict(self): return {"count": self.count, "inner": self.inner.state_dict()}
    def load_state_dict(self, state): self.count = state["count"]; self.inner.load_state_dict(state["inner"])
optimizer = Wrapper()
def train(batch):
    loss_of(batch).backward(); optimizer.step()
""",
}
LOOP = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=3) as run:
    for batch in run.steps(total=20):
        train(batch)
        run.log(loss=loss_of(batch))
        if os.environ.get("DIE") and run.batch == 10: settle(); os.kill(os.getpid(), signal.SIGKILL)
print("batches", run.batch); show()
"""


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_batch_that_trains_is_a_step_whoever_steps(name: str, nursery: Nursery, tmp_path: Path) -> None:
    """`total=20` continued for ever, nothing was saved, and nothing was said."""
    script = HEAD + SAM + SHAPES[name] + LOOP
    places = [tmp_path / word for word in ("whole", "killed")]
    for place in places:
        place.mkdir()
    whole = nursery.run(script, [], places[0])
    assert whole.code == 0 and "batches 20" in whole.output, whole.output
    assert ("each batch counts as a step" in whole.output) == (name == "SAM by hand")
    killed = nursery.run(script, [], places[1], {**EVERY_SAVE, "DIE": "1"})
    again = nursery.run(script, [], places[1], {"DIE": ""})
    assert killed.code == -9 and "resuming from step-00000009" in again.output, again.output
    assert final(again.output) == final(whole.output)


UNREPORTED = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=10) as run:
    for batch in run.steps(total=200):
        loss = model(batch[0]).square().mean()
        optimizer.zero_grad(); loss.backward()
        for p in model.parameters(): p.data -= 0.01 * p.grad
print("batches", run.batch); show()
"""


def test_weights_written_by_hand_are_noticed_after_fifty_batches(nursery: Nursery, tmp_path: Path) -> None:
    ended = nursery.run(HEAD + UNREPORTED, [], tmp_path)
    assert ended.code == 0, ended.output
    assert ended.output.count("each batch counts as a step") == 1
    assert "batches 249" in ended.output  # 49 before it was known


LATE = """
steps = []
buffer = torch.zeros(1)
with jackline.attach(model=model, optimizer=optimizer, buffer=buffer, loader=loader, save_every_steps=20) as run:
    for batch in run.steps(total=30):
        buffer += batch[0].sum()
        if run.batch >= 120: train(batch)
        if os.environ.get("DIE") and run.batch == 110: settle(); os.kill(os.getpid(), int(os.environ["DIE"]))
print("batches", run.batch, buffer.item().hex()); show()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_before_an_optimizer_starts_saves_and_stops_come_between_batches(
    number: signal.Signals, nursery: Nursery, tmp_path: Path
) -> None:
    places = [tmp_path / word for word in ("whole", "killed")]
    for place in places:
        place.mkdir()
    whole = nursery.run(HEAD + LATE, [], places[0])
    assert whole.code == 0 and "batches 150" in whole.output, whole.output
    said = "50 batches without a step of an attached optimizer, and no gradients"
    assert whole.output.count(said) == 1
    ended = nursery.run(HEAD + LATE, [], places[1], {**EVERY_SAVE, "DIE": str(int(number))})
    assert ended.code == (75 if number == signal.SIGTERM else -9), ended.output
    again = nursery.run(HEAD + LATE, [], places[1], {"DIE": ""})
    lines = [line for line in again.output.splitlines() if line.startswith(("batches", "final"))]
    assert lines == [line for line in whole.output.splitlines() if line.startswith(("batches", "final"))]
    assert "resuming from step-00000000" in again.output
    batch = int(again.output.split("data: epoch ")[1].split("batch ")[1].split()[0])
    epoch = int(again.output.split("data: epoch ")[1].split(",")[0])
    assert epoch * 12 + batch >= (111 if number == signal.SIGTERM else 89)


TWO = """
other = torch.nn.Linear(4, 1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
with jackline.attach(model=model, optimizer=optimizer, other=other, second=second, loader=loader,
                     save_every_steps=5) as run:
    for batch in run.steps(total=40):
        train(batch)
        if run.batch >= 70:
            second.zero_grad(); other(batch[0]).square().mean().backward(); second.step()
        if os.environ.get("DIE") and run.batch == 66: settle(); os.kill(os.getpid(), signal.SIGKILL)
print("batches", run.batch); show()
"""


def test_an_optimizer_that_has_not_started_is_not_waited_for(nursery: Nursery, tmp_path: Path) -> None:
    found = []
    for name, dies in (("whole", ""), ("killed", "1")):
        place = tmp_path / name
        place.mkdir()
        ended = nursery.run(HEAD + TWO, [], place, {**EVERY_SAVE, "DIE": dies})
        if dies:
            assert ended.code == -9
            ended = nursery.run(HEAD + TWO, [], place, {"DIE": ""})
            assert "resuming from step-00000015" in ended.output, ended.output
        else:
            assert ended.output.count("50 batches without a step of the attached optimizer SGD (number 1)") == 1
        assert ended.code == 0, ended.output
        found.append([line for line in ended.output.splitlines() if line.startswith(("batches", "final"))])
    assert found[0] == found[1] and "batches 89" in found[0][0]


FORGOTTEN = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=5) as run:
    for batch in run.steps(total=40):
        model(batch[0]).square().mean().backward()
        if run.batch == 20: os.kill(os.getpid(), signal.SIGTERM)
        if run.batch > 5000: os._exit(9)
"""


def test_a_loop_that_only_adds_up_gradients_is_told_and_can_be_stopped(nursery: Nursery, tmp_path: Path) -> None:
    ended = nursery.run(HEAD + FORGOTTEN, [], tmp_path)
    assert ended.code == 75, ended.output
    assert ended.output.count("Is optimizer.step() missing?") == 1
    assert (
        "SIGTERM: stopped after 256 batches without a step, not saved; the checkpoint of step 0 stands"
        in ended.output
    )


ACCUMULATED = """
for _ in range(1):
    with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=2, TRIAL) as run:
        for COUNTED in ITERATED:
            model(batch[0]).square().mean().backward()
            if LAST: optimizer.step(); optimizer.zero_grad()
            if os.environ.get("DIE") and run.step == 5: os.kill(os.getpid(), signal.SIGTERM)
show()
"""


@pytest.mark.parametrize("is_ours", [True, False], ids=["run.batch", "enumerate"])
def test_a_count_of_batches_that_starts_again_is_reported(is_ours: bool, nursery: Nursery, tmp_path: Path) -> None:
    counted, iterated, last = (
        ("batch", "run.steps(total=20)", "run.batch % 4 == 0")
        if is_ours
        else ("i, batch", "enumerate(run.steps(total=20))", "i % 4 == 0")
    )
    script = ACCUMULATED.replace("COUNTED", counted).replace("ITERATED", iterated).replace("LAST", last)
    script = script.replace("TRIAL", f"trial={is_ours}")  # two steps, trained twice, refuse it
    (tmp_path / "whole").mkdir()
    whole = nursery.run(HEAD + script, [], tmp_path / "whole")
    stopped = nursery.run(HEAD + script, [], tmp_path, {"DIE": "1"})
    again = nursery.run(HEAD + script, [], tmp_path, {"DIE": ""})
    assert (whole.code, stopped.code, again.code) == (0, 75, 0), whole.output + again.output
    if is_ours:
        assert final(again.output) == final(whole.output)
        assert "starts at 0 again" not in whole.output + again.output
    else:
        assert "counts batches with enumerate(run.steps()): after a resume" in whole.output.split("final")[0]
        assert (
            "the first step after the resume has 1 batches, the steps before it had 4: does the loop count batches "
            "itself (enumerate)?" in again.output
        )


AHEAD = """
x = torch.randn(50, 4)
def get_batch(): return x[torch.randint(50, (8,))],
with jackline.attach(model=model, optimizer=optimizer) as run:
    BEFORE
    for _ in run.steps(total=3):
        FIRST
        train(batch)
        LAST
"""


@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_batch_that_is_fetched_ahead_is_named_before_the_first_step(
    is_ahead: bool, nursery: Nursery, tmp_path: Path
) -> None:
    fetch, none = "batch = get_batch()", "pass"
    script = AHEAD.replace("BEFORE", fetch if is_ahead else none).replace("LAST", fetch if is_ahead else none)
    ended = nursery.run(HEAD + script.replace("FIRST", none if is_ahead else fetch), [], tmp_path)
    words = "A batch fetched with them is in no checkpoint"
    assert (words in ended.output) == is_ahead, ended.output
    # Two steps that are trained again with another batch first give another result: refused before step 3.
    assert (ended.code, "batch (a tuple)" in ended.output) == (int(is_ahead), is_ahead), ended.output


EPOCHS = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=2) as run:
    for epoch in range(3):
        for batch in run.steps(): train(batch)
show()
"""


def test_a_loop_that_counts_its_epochs_is_told_before_it_writes_a_file_twice(
    nursery: Nursery, tmp_path: Path
) -> None:
    ended = nursery.run(HEAD + EPOCHS, [], tmp_path)
    assert ended.output.count("this loop counts its epochs itself: after a resume") == 1, ended.output


def test_an_optimizer_without_places_for_hooks_is_refused_in_words() -> None:
    """Lookahead wrappers never call Optimizer.__init__: attach ended with an AttributeError of torch."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(UsageError, match=r"Wrapper does not call Optimizer\.__init__, so its steps cannot"):
        Stepper({"optimizer": Wrapper(inner)}, None)

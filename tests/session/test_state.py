"""State that torch or the person keeps where no state_dict looks: restored exactly, or named in time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.session.nursery import EVERY_SAVE, Nursery
from tests.session.test_attach import HEAD, final, killed_and_whole

SHAPES = {
    "a ring and other plain objects": """
from collections import deque, Counter
ring, recent, seen, counts = np.zeros(5), deque(maxlen=3), set(), Counter()
with jackline.attach(model=model, optimizer=optimizer, loader=loader, ring=ring, recent=recent, seen=seen,
                     counts=counts, save_every_steps=1) as run:
    for batch in run.steps(total=12):
        loss = train([batch[0] * (1 + ring.mean() + len(seen) / 9 + sum(recent))])
        ring[run.step % 5] = loss.item(); recent.append(loss.item()); seen.add(run.step); counts["x"] += 1
        die_at(7)
show(); print("final", ring.tolist(), recent, seen, counts)
""",
    "a part is unfrozen, dropout and counters change, evaluation leaves eval mode": """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.count = 0
    def forward(self, x):
        self.count += 1
        self.scale *= 0.9
        return self.last(self.drop(self.first(x)) * self.scale) * (1 + self.count / 10)
model = Net(); model.first.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for batch in run.steps(total=12):
        if run.step == 3: model.first.requires_grad_(True)
        if run.step == 4: model.drop.p = 0.5
        if run.step == 5: model.drop.eval()
        train(batch); die_at(7)
show()
""",
    "an optimizer inside an optimizer": """
class Sam(torch.optim.Optimizer):
    def __init__(self, params, **settings):
        super().__init__(params, settings)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
    def step(self, closure=None): self.base_optimizer.step()
    def load_state_dict(self, state):
        super().load_state_dict(state); self.base_optimizer.param_groups = self.param_groups
optimizer = Sam(model.parameters(), lr=0.1, momentum=0.9)
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
    for batch in run.steps(total=12): train(batch); die_at(7)
show()
""",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_state_outside_state_dict_resumes_exactly(shape: str, nursery: Nursery, tmp_path: Path) -> None:
    script = SHAPES[shape].replace("show(); print", "print")
    found, wanted, output = killed_and_whole(nursery, script, tmp_path, **EVERY_SAVE)
    assert found == wanted
    assert "resuming from step-" in output


def test_what_cannot_be_filled_is_refused_before_there_is_a_run(nursery: Nursery, tmp_path: Path) -> None:
    script = "jackline.attach(model=model, optimizer=optimizer, pair=(1.5, [2]))"
    ended = nursery.run(HEAD + script, [], tmp_path)
    assert (
        "error: pair is a tuple: it cannot be restored in your own variable\n"
        "hint: attach a list, dict, array, tensor or an object with state_dict(); plain values live in run.values\n"
    ) in ended.output
    assert not (tmp_path / "runs").exists()


def test_an_attribute_that_cannot_be_saved_is_named_at_the_save_and_at_the_resume(
    nursery: Nursery, tmp_path: Path
) -> None:
    script = """
with jackline.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1, verify=False) as run:
    for batch in run.steps(total=9):
        model[0].source = iter([run.step])
        train(batch); die_at(5)
show()
"""
    died = nursery.run(HEAD + script, [], tmp_path, {"DIE": "1", **EVERY_SAVE})
    assert died.code == -9, died.output
    assert (
        died.output.count("[jackline] model.0.source (a list_iterator) changes during training and is not saved") == 1
    )
    again = nursery.run(HEAD + script, [], tmp_path)
    assert "[jackline]   model.0.source had changed and could not be saved (a list_iterator)" in again.output
    assert re.search(r"^final 9", final(again.output))

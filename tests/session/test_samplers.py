"""A person's sampler decides what is trained on: in a plain loop, under Accelerate and in transformers' Trainer.

Only torch's own plain order over the whole dataset is replaced by a seekable one. The indices of everything else are
drawn through. Each script prints the indices it trained on; the loop without Jackline says what they must be.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.session.nursery import Nursery
from tests.session.test_integrations import needs

pytestmark = pytest.mark.xdist_group("integrations")

HEAD = """
import os, random, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)
os.environ["ACCELERATE_USE_CPU"] = "true"
from torch.utils.data import (BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset,
                              SubsetRandomSampler, WeightedRandomSampler)
NAME, EPOCHS = sys.argv[1], 2
EVERY = int(os.environ.get("EVERY", "1"))  # steps between two saves

class Data(torch.utils.data.Dataset):
    def __len__(self): return 23
    def __getitem__(self, index): return {"x": torch.tensor([float(index)]), "labels": torch.tensor(index)}

class Half(RandomSampler):
    def __iter__(self): return iter([2 * index for index in torch.randperm(7).tolist()])
    def __len__(self): return 7

class Backwards(SequentialSampler):
    def __iter__(self): return iter(range(9, -1, -1))
    def __len__(self): return 10

class Keeps:  # shuffles a list of its own a little further in every epoch
    def __init__(self): self.order, self.rng = list(range(11)), random.Random(4)
    def __len__(self): return 11
    def __iter__(self): self.rng.shuffle(self.order); return iter(list(self.order))

class Pairs:  # a batch sampler of batches of different sizes
    def __len__(self): return 4
    def __iter__(self): return iter([[0, 1], [2, 3, 4], [5], [21, 22]])

data = Data()
SAMPLERS = {
    "shuffle": lambda: dict(shuffle=True, batch_size=3),
    "plain order": lambda: dict(batch_size=3),
    "held out": lambda: dict(sampler=RandomSampler(range(10)), batch_size=3),
    "first ten": lambda: dict(sampler=SequentialSampler(range(10)), batch_size=3),
    "few": lambda: dict(sampler=RandomSampler(data, num_samples=8), batch_size=3),
    "many": lambda: dict(sampler=RandomSampler(data, num_samples=30), batch_size=3),
    "replacement": lambda: dict(sampler=RandomSampler(data, replacement=True, num_samples=12), batch_size=3),
    "generator": lambda: dict(sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5)), batch_size=3),
    "random subclass": lambda: dict(sampler=Half(data), batch_size=3),
    "sequential subclass": lambda: dict(sampler=Backwards(data), batch_size=3),
    "subset": lambda: dict(sampler=SubsetRandomSampler([1, 5, 9, 13, 17]), batch_size=2),
    "weighted": lambda: dict(sampler=WeightedRandomSampler([1.0] * 6 + [0.0] * 17, 14), batch_size=3),
    "distributed": lambda: dict(sampler=DistributedSampler(data, 2, 1, seed=3), batch_size=3),
    "keeps": lambda: dict(sampler=Keeps(), batch_size=3),
    "batches": lambda: dict(batch_sampler=Pairs()),
    "batches of a range": lambda: dict(batch_sampler=BatchSampler(RandomSampler(range(10)), 3, True)),
    "a list": lambda: dict(sampler=[3, 1, 4, 15, 9], batch_size=2),
}
loader = DataLoader(data, **SAMPLERS[NAME]())

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []
    def forward(self, x, labels=None):
        print("seen", self.epoch(), labels.tolist(), flush=True)
        return {"loss": self.layer(x / 23).square().mean(), "logits": x}

model = Net()
def die_at(step):
    if os.environ.get("DIE") == str(step): os.kill(os.getpid(), signal.SIGKILL)
"""
PLAIN = """
import jackline
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(batch):
    model(**batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
if os.environ.get("BARE"):
    for epoch in range(EPOCHS):
        model.epoch = lambda: epoch
        if hasattr(loader.sampler, "set_epoch"): loader.sampler.set_epoch(epoch)
        for batch in loader: step(batch)
else:
    with jackline.attach(model=model, optimizer=optimizer, loader=loader, name="x", save_every_steps=EVERY) as run:
        model.epoch = lambda: run.epoch
        for epoch in run.epochs(EPOCHS):
            for batch in run.steps():
                step(batch)
                die_at(run.step)
"""
ACCELERATE = """
from accelerate import Accelerator
from jackline.session.integrations import accelerate as jackline_accelerate
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
def step(batch):
    accelerator.backward(model(**batch)["loss"])
    optimizer.step()
    optimizer.zero_grad()
if os.environ.get("BARE"):
    for epoch in range(EPOCHS):
        model.epoch = lambda: epoch
        loader.set_epoch(epoch)
        for batch in loader: step(batch)
else:
    with jackline_accelerate.attach(accelerator, model=model, optimizer=optimizer, loader=loader, name="x",
                                    save_every_steps=EVERY) as run:
        model.epoch = lambda: run.epoch
        for epoch in run.epochs(EPOCHS):
            for batch in run.steps():
                step(batch)
                die_at(run.step)
"""
TRANSFORMERS = """
from transformers import Trainer, TrainerCallback, TrainingArguments
from jackline.session.integrations.transformers import exact
given = SAMPLERS[NAME]()
class Own(Trainer):
    def get_train_dataloader(self):
        return self.accelerator.prepare(DataLoader(data, **given))
class Die(TrainerCallback):
    def on_step_end(self, args, state, control, **more): die_at(state.global_step)
arguments = TrainingArguments("out", num_train_epochs=EPOCHS, save_strategy="no", report_to=[], seed=3, use_cpu=True,
                              disable_tqdm=True, remove_unused_columns=False)
kind = Own if os.environ.get("BARE") else exact(Own)
kind.jackline = {"name": "x", "save_every_steps": EVERY}
trainer = kind(model=model, args=arguments, train_dataset=data, callbacks=[Die()])
model.epoch = lambda: int(trainer.state.epoch or 0)
trainer.train()
"""
ROADS = {"plain": PLAIN, "accelerate": ACCELERATE, "transformers": TRANSFORMERS}
IN_ORDER = ("plain order", "first ten", "sequential subclass", "batches", "a list", "distributed")
DRAWN_ANEW = ("few", "many", "replacement", "weighted")  # which of them: chance decides
NAMES = [
    "shuffle",
    "plain order",
    "held out",
    "first ten",
    "few",
    "many",
    "replacement",
    "generator",
    "random subclass",
    "sequential subclass",
    "subset",
    "weighted",
    "distributed",
    "keeps",
    "batches",
    "batches of a range",
    "a list",
]


@pytest.fixture(scope="module")
def nursery(framework_nursery: Nursery) -> Nursery:
    return framework_nursery


def trained(output: str) -> dict[int, list[list[int]]]:
    """The batches of each epoch."""
    found: dict[int, list[list[int]]] = {}
    for line in output.splitlines():
        if line.startswith("seen "):
            _, epoch, batch = line.split(" ", 2)
            found.setdefault(int(epoch), []).append(json.loads(batch))
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


# Every sampler in one kind of loop; all pairs with `-m slow`.
PAIRS = [
    pytest.param(road, name, marks=() if number % 3 == at else pytest.mark.slow)
    for at, road in enumerate(ROADS)
    for number, name in enumerate(NAMES)
]


@pytest.mark.parametrize(("road", "name"), PAIRS)
def test_what_is_trained_on_is_what_the_sampler_says_also_after_a_kill(
    road: str, name: str, nursery: Nursery, tmp_path: Path
) -> None:
    if road != "plain":
        needs(road)
    script = HEAD + ROADS[road]
    places = [tmp_path / word for word in ("bare", "whole", "killed")]
    for place in places:
        place.mkdir()
    bare = nursery.run(script, [name], places[0], {"BARE": "1"})
    whole = nursery.run(script, [name], places[1], {"EVERY": "1000"})  # nobody resumes from it
    assert bare.code == 0 and whole.code == 0, bare.output + whole.output
    wanted, found = trained(bare.output), trained(whole.output)
    assert list(map(len, wanted.values())) == list(map(len, found.values()))
    for epoch, batches in wanted.items():
        if name in IN_ORDER:
            assert found[epoch] == batches
        elif name in DRAWN_ANEW:
            assert list(map(len, found[epoch])) == list(map(len, batches))
            assert name != "weighted" or set(flat(found[epoch])) <= set(range(6))
            assert name != "few" or max(Counter(flat(found[epoch])).values()) == 1
        elif name == "batches of a range":  # drops the last: which one chance decides
            assert set(flat(found[epoch])) < set(range(10)) and len(set(flat(found[epoch]))) == 9
        else:
            assert Counter(flat(found[epoch])) == Counter(flat(batches))
    # In the second epoch, with batches of it behind.
    step = str(len(found[0]) + 1)
    died = nursery.run(script, [name], places[2], {"DIE": step})
    assert died.code == -9, died.output
    again = nursery.run(script, [name], places[2])
    assert again.code == 0, again.output
    # A step that was not saved yet is trained again; what was done before and after is that of the whole run.
    before, after = flat(trained(died.output)[1]), flat(trained(again.output)[1])
    assert flat(found[1])[-len(after) :] == after and flat(found[1])[: len(before)] == before
    assert len(before) + len(after) >= len(flat(found[1]))

"""Shapes: where samples come from, in which order, and how that changes during training."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import jackline
from tests.session.loops.table import Go, loss_of, make_data, make_loader, make_model, plain_loop, shape, step


class Noisy(Dataset):  # type: ignore[type-arg]
    """Draws from every library."""

    def __init__(self, count: int = 40) -> None:
        self.count = count
        self.own = np.random.default_rng(5)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(()) + float(np.random.rand()) + random.random() + float(self.own.random())
        x = torch.full((4,), index / 40) + 0.1 * noise
        return x, x.sum(0, keepdim=True)


PLAIN = {
    "shuffle": {},
    "in order, last dropped": {"shuffle": False, "drop_last": True},
    "shuffle with two workers": {"num_workers": 2},
    "shuffle with persistent workers": {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4},
    "shuffle with a generator": {"generator": 9},
    "noise of four libraries": {"data": Noisy},
    "noise of four libraries, two workers": {"data": Noisy, "num_workers": 2},
    "weighted": {"sampler": lambda data: WeightedRandomSampler(torch.arange(1.0, 41), 40)},
    "weighted, workers and noise": {
        "data": Noisy,
        "num_workers": 2,
        "sampler": lambda data: WeightedRandomSampler(torch.arange(1.0, 41), 40),
    },
    "with replacement": {"sampler": lambda data: RandomSampler(data, replacement=True, num_samples=30)},
    "a subset": {"sampler": lambda data: SubsetRandomSampler(range(0, 40, 2))},
    "one of two ranks": {"sampler": lambda data: DistributedSampler(data, 2, 1)},
}


def _make(given: dict[str, Any]) -> Any:
    given = dict(given)
    data = given.pop("data", make_data)()
    if "sampler" in given:
        given["sampler"] = given["sampler"](data)
    if "generator" in given:
        given["generator"] = torch.Generator().manual_seed(given["generator"])
    return make_loader(data, **given)


for _name, _given in PLAIN.items():
    shape(_name)(lambda go, given=_given: plain_loop(go, _make(given)))


@shape("jackline.Loader")
def own_loader(go: Go) -> None:
    plain_loop(go, jackline.Loader(Noisy(), 4, shuffle=True, seed=4, num_workers=1))


# -- samplers that change -------------------------------------------------------------------------------------------


class Buckets:
    """A batch sampler that shuffles neighbours, and draws while it goes."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(start, start + 4)) for start in range(0, 40, 4)]
        random.shuffle(batches)
        for batch in batches:
            random.shuffle(batch)
            yield batch

    def __len__(self) -> int:
        return 10


class Restless:
    """Shuffles a list it keeps."""

    def __init__(self) -> None:
        self.order = list(range(40))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(list(self.order))

    def __len__(self) -> int:
        return 40


class Live:
    """Draws one sample at a time from weights that training changes meanwhile."""

    def __init__(self) -> None:
        self.weights = torch.ones(40)

    def __iter__(self) -> Iterator[int]:
        for _ in range(40):
            yield int(torch.multinomial(self.weights, 1))

    def __len__(self) -> int:
        return 40


class LiveStateful(Live):
    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 40:
            self.position += 1
            yield int(torch.multinomial(self.weights, 1))
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.clone(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.position = state["weights"].clone(), state["position"]


@shape("buckets")
def buckets(go: Go) -> None:
    plain_loop(go, make_loader(batch_sampler=Buckets()))


@shape("a sampler that keeps its list")
def restless(go: Go) -> None:
    plain_loop(go, make_loader(sampler=Restless()), total=33)


def _live(go: Go, sampler: Any, every: int, **more: Any) -> None:
    model, loader = make_model(), make_loader(sampler=sampler, **more)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for _ in run.epochs(4):
            for batch in run.steps():
                loss = step(model, optimizer, batch)
                if every and run.batch % every == 0:
                    sampler.weights[run.batch % 40] += float(loss) * 10
                go.log(run, loss=loss, first=batch[0].flatten()[0])
            if not every:
                sampler.weights[:20] *= 1.5
    go.end(model)


@shape("weights that change after each epoch")
def weights_by_epoch(go: Go) -> None:
    _live(go, WeightedRandomSampler(torch.ones(40), 40), 0)


@shape("weights that change during an epoch")
def weights_by_batch(go: Go) -> None:
    _live(go, WeightedRandomSampler(torch.ones(40), 40), 2)


@shape("weights that change after each epoch, two workers")
def weights_by_epoch_with_workers(go: Go) -> None:
    _live(go, WeightedRandomSampler(torch.ones(40), 40), 0, num_workers=2)


@shape("a sampler that draws from live weights")
def live(go: Go) -> None:
    _live(go, Live(), 2)


@shape("a sampler that draws from live weights, with state_dict")
def live_stateful(go: Go) -> None:
    _live(go, LiveStateful(), 2)


@shape("hard examples first, chosen from losses")
def hard_first(go: Go) -> None:
    losses = torch.zeros(40)

    class Hardest:
        def __init__(self) -> None:
            self.losses = losses

        def __iter__(self) -> Iterator[int]:
            return iter(torch.argsort(self.losses, descending=True, stable=True).tolist())

        def __len__(self) -> int:
            return 40

    data = torch.utils.data.TensorDataset(*make_data().tensors, torch.arange(40))
    model, loader = make_model(), make_loader(data, sampler=Hardest())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with go.attach(model=model, optimizer=optimizer, losses=losses, loader=loader) as run:
        for _ in run.epochs(3):
            for x, y, index in run.steps():
                loss = step(model, optimizer, (x, y))
                losses[index] = (model(x) - y).detach().square().flatten()
                go.log(run, loss=loss, first=float(index[0]))
    go.end(model)


# -- data that change -----------------------------------------------------------------------------------------------


class Growing(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.count = 10

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        x = torch.full((4,), index / 40)
        return x, x.sum(0, keepdim=True)


def _growing(go: Go, *, at_start: bool, **more: Any) -> None:
    data = Growing()
    model, loader = make_model(), make_loader(data, **more)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for epoch in run.epochs(4):
            if at_start:
                data.count = 10 * (epoch + 1)
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch), first=batch[0].flatten()[0])
            if not at_start:
                data.count += 10
    go.end(model)


@shape("data that grow before each epoch")
def growing(go: Go) -> None:
    _growing(go, at_start=True)


@shape("data that grow before each epoch, one worker")
def growing_with_worker(go: Go) -> None:
    _growing(go, at_start=True, num_workers=1)


@shape("data that grow after each epoch")
def growing_after(go: Go) -> None:
    _growing(go, at_start=False)


@shape("data that grow, with RandomSampler of a number")
def growing_sampled(go: Go) -> None:
    data = Growing()
    plain_loop(go, make_loader(data, sampler=RandomSampler(data, num_samples=7)))


@shape("a curriculum in the dataset, by epoch")
def curriculum(go: Go) -> None:
    class Lessons(Dataset):  # type: ignore[type-arg]
        level = 1

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            x = torch.full((4,), index / 40 * self.level)
            return x, x.sum(0, keepdim=True)

    data = Lessons()
    model, loader = make_model(), make_loader(data)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for epoch in run.epochs(3):
            data.level = 1 + epoch
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("mixup")
def mixup(go: Go) -> None:
    model, loader = make_model(), make_loader(Noisy())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for x, y in run.steps(total=24):
            share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
            mixed = share * x + (1 - share) * x[order], share * y + (1 - share) * y[order]
            go.log(run, loss=step(model, optimizer, mixed))
    go.end(model)


@shape("a second loader inside the step")
def second_loader(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    others = iter(make_loader(make_data(400), batch_size=2))
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            loss = step(model, optimizer, batch)
            go.log(run, loss=loss, more=step(model, optimizer, next(others)))
    go.end(model)


@shape("validation between epochs, on a shuffled loader")
def validation(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for _ in run.epochs(3):
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
            with torch.no_grad():
                run.log(val=sum(float(loss_of(model, batch)) for batch in make_loader(Noisy())))
    go.end(model)

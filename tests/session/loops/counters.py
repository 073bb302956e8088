"""Shapes: who counts batches and epochs, and where batches come from without a loader."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tests.session.loops.table import Go, loss_of, make_data, make_loader, make_model, sgd, shape, step


@shape("accumulation, a short step at the end of each epoch")
def ragged(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for epoch in run.epochs(4):
            for batch in run.steps():
                loss = loss_of(model, batch)
                loss.backward()
                number = run.batch - epoch * len(loader) + 1
                if number % 4 == 0 or number == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
                go.log(run, loss=loss)
    go.end(model)


@shape("accumulation by run.batch")
def by_batch(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
        for batch in run.steps(total=10):
            loss = loss_of(model, batch)
            loss.backward()
            if run.batch % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            go.log(run, loss=loss)
    go.end(model)


@shape("accumulation by enumerate")
def by_enumerate(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
        for i, batch in enumerate(run.steps(total=10)):
            loss = loss_of(model, batch)
            loss.backward()
            if i % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            go.log(run, loss=loss)
    go.end(model)


@shape("accumulation by an own counter")
def by_counter(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    count = 0
    with go.attach(model=model, optimizer=optimizer, loader=loader, save_every_steps=1) as run:
        for batch in run.steps(total=12):
            loss = loss_of(model, batch)
            loss.backward()
            if count % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            count += 1
            go.log(run, loss=loss)
    go.end(model)


@shape("epochs counted by the loop")
def own_epochs(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    with go.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as run:
        for _ in range(3):
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
            scheduler.step()
    go.end(model)


@shape("no loader, batches made in the step")
def no_loader(go: Go) -> None:
    model = make_model()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer) as run:
        for number in run.steps(total=24):
            x = torch.randn(4, 4) + float(np.random.rand()) + random.random() + number / 100
            go.log(run, loss=step(model, optimizer, (x, x.sum(1, keepdim=True))))
    go.end(model)


@shape("a batch fetched ahead")
def fetched_ahead(go: Go) -> None:
    model, (x, y) = make_model(), make_data().tensors
    optimizer = sgd(model)

    def get_batch() -> Any:
        places = torch.randint(40, (4,))
        return x[places], y[places]

    with go.attach(model=model, optimizer=optimizer) as run:
        batch = get_batch()
        for _ in run.steps(total=24):
            loss = step(model, optimizer, batch)
            batch = get_batch()
            go.log(run, loss=loss)
    go.end(model)


@shape("own generators")
def own_generators(go: Go) -> None:
    model = make_model()
    optimizer = sgd(model)
    first, second = torch.Generator().manual_seed(8), np.random.default_rng(8)
    with go.attach(model=model, optimizer=optimizer, first=first, second=second) as run:
        for _ in run.steps(total=24):
            x = torch.randn(4, 4, generator=first) + float(second.normal())
            go.log(run, loss=step(model, optimizer, (x, x.sum(1, keepdim=True))))
    go.end(model)


@shape("k-fold")
def k_fold(go: Go) -> None:
    found = []
    for fold in range(3):
        model = make_model()
        optimizer = sgd(model)
        part = torch.utils.data.Subset(make_data(), [index for index in range(40) if index % 3 != fold])
        with go.attach(model=model, optimizer=optimizer, loader=make_loader(part), name=f"fold-{fold}") as run:
            for batch in run.steps(total=9):
                go.log(run, loss=step(model, optimizer, batch))
        found.append(model.state_dict())
    go.end(*found)


@shape("a sweep of learning rates")
def sweep(go: Go) -> None:
    found = []
    for rate in (0.1, 0.01):
        model = make_model()
        optimizer = sgd(model, lr=rate)
        with go.attach(model=model, optimizer=optimizer, loader=make_loader(), name=f"rate-{rate}") as run:
            for batch in run.steps(total=10):
                go.log(run, loss=step(model, optimizer, batch))
        found.append(model.state_dict())
    go.end(*found)

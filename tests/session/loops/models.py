"""Shapes: models that change during training, or keep more than their parameters."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.session.loops.table import Go, make_loader, make_model, sgd, shape, step


@shape("unfreezing after an epoch")
def unfreezing(go: Go) -> None:
    model, loader = make_model(), make_loader()
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for epoch in run.epochs(4):
            if epoch == 1:
                for p in model[0].parameters():
                    p.requires_grad_(True)
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("dropout that is changed")
def dropout(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            if run.step == 8:
                model[2].p = 0.5
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("a counter in a module")
def counter(go: Go) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.count = nn.Linear(4, 1), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.layer(x) / (1 + self.count / 10)

    model, loader = Counting(), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("a buffer that is not persistent")
def not_persistent(go: Go) -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.register_buffer("mean", torch.zeros(4), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0).detach())
            return self.layer(x - self.mean)

    model, loader = Running(), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("eval mode kept for one part after a while")
def modes(go: Go) -> None:
    model, loader = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            if run.step == 8:
                model[1].eval()
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("batch normalisation")
def batch_norm(go: Go) -> None:
    model, loader = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("spectral normalisation")
def spectral(go: Go) -> None:
    model, loader = make_model(), make_loader()
    parametrizations.spectral_norm(model[0])
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("pruned from the beginning")
def pruned(go: Go) -> None:
    model, loader = make_model(), make_loader()
    prune.random_unstructured(model[0], "weight", amount=0.3)
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            if run.step == 9:
                prune.l1_unstructured(model[0], "weight", amount=2)
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("masks that are searched")
def masks(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    mask = {"first": torch.ones_like(model[0].weight)}
    with go.attach(model=model, optimizer=optimizer, mask=mask, loader=loader) as run:
        for batch in run.steps(total=24):
            loss = step(model, optimizer, batch)
            if run.step % 6 == 0:
                mask["first"] = (torch.rand_like(mask["first"]) > 0.3).float()
            with torch.no_grad():
                model[0].weight *= mask["first"]
            go.log(run, loss=loss)
    go.end(model)


@shape("progressive growing, width by epoch")
def progressive(go: Go) -> None:
    model, loader = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), make_loader()
    head = nn.Linear(4, 1)
    optimizer = sgd(model, head)
    with go.attach(model=model, head=head, optimizer=optimizer, loader=loader) as run:
        for epoch in run.epochs(3):
            for x, y in run.steps():
                out = x
                for layer in list(model)[: epoch + 1]:
                    out = layer(out).tanh()
                loss = (head(out) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                go.log(run, loss=loss)
    go.end(model, head)


@shape("lazy modules, initialised before attach")
def lazy(go: Go) -> None:
    model, loader = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)), make_loader()
    model(torch.zeros(1, 4))
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("lazy modules")
def lazy_in_the_loop(go: Go) -> None:
    model, loader = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("tied weights")
def tied(go: Go) -> None:
    model, loader = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)), make_loader()
    model[2].weight = model[0].weight
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("a thread that writes, joined in the step")
def thread(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    total = torch.zeros(1)
    with go.attach(model=model, optimizer=optimizer, total=total, loader=loader) as run:
        for batch in run.steps(total=24):
            loss = step(model, optimizer, batch)
            writer = threading.Thread(target=lambda value=float(loss): total.add_(value))
            writer.start()
            writer.join()
            go.log(run, loss=loss + total)
    go.end(model, {"total": total})


@shape("diffusion with a generator of its own")
def diffusion(go: Go) -> None:
    model, loader = make_model(5), make_loader()
    model[-1] = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(2)
    with go.attach(model=model, optimizer=optimizer, generator=generator, loader=loader) as run:
        for x, _ in run.steps(total=24):
            when = torch.rand(len(x), 1, generator=generator)
            noise = torch.randn(x.shape, generator=generator)
            loss = (model(torch.cat([x + when * noise, when], 1)) - noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(model)


@shape("metrics gathered over an epoch, attached")
def metrics(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader, total=0.0) as run:
        for _ in run.epochs(3):
            run.values.setdefault("total", 0.0)
            for batch in run.steps():
                loss = step(model, optimizer, batch)
                run.values["total"] += float(loss)
                go.log(run, loss=loss, total=run.values["total"])
    go.end(model, run.values)

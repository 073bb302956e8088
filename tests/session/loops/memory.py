"""Shapes: averages, queues and other values that a loop keeps from step to step."""

from __future__ import annotations

import torch
from torch import nn

from tests.session.loops.table import Go, loss_of, make_data, make_loader, make_model, sgd, shape, step


@shape("MoCo queue")
def moco(go: Go) -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3)
            self.register_buffer("queue", torch.randn(12, 3))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    model, loader = Queue(), make_loader()
    optimizer = torch.optim.SGD(model.query.parameters(), 0.05)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for x, _ in run.steps(total=24):
            with torch.no_grad():
                for old, new in zip(model.key.parameters(), model.query.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
                keys = model.key(x)
            loss = (model.query(x + 0.1 * torch.randn_like(x)) @ torch.cat([keys, model.queue]).T).logsumexp(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            place = int(model.place)
            model.queue[place : place + 4] = keys
            model.place[0] = (place + 4) % 12
            go.log(run, loss=loss)
    go.end(model)


@shape("EMA swapped in for validation")
def ema_swap(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    x, y = make_data().tensors
    with go.attach(model=model, optimizer=optimizer, ema=ema, loader=loader) as run:
        for batch in run.steps(total=24):
            loss = step(model, optimizer, batch)
            ema.update_parameters(model)
            value = 0.0
            if run.step % 5 == 0:
                kept = [p.data for p in model.parameters()]
                for p, average in zip(model.parameters(), ema.module.parameters(), strict=True):
                    p.data = average.data
                with torch.no_grad():
                    value = float(loss_of(model.eval(), (x, y)))
                model.train()
                for p, data in zip(model.parameters(), kept, strict=True):
                    p.data = data
            go.log(run, loss=loss, value=value)
    go.end(model, ema)


@shape("stochastic weight averaging")
def swa(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, 0.01, anneal_epochs=2)
    with go.attach(model=model, optimizer=optimizer, average=average, scheduler=scheduler, loader=loader) as run:
        for epoch in run.epochs(3):
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
            if epoch:
                average.update_parameters(model)
                scheduler.step()
    go.end(model, average)


@shape("a codebook moved by averages")
def codebook(go: Go) -> None:
    book, encoder, loader = nn.Embedding(6, 4), nn.Linear(4, 4), make_loader()
    book.weight.requires_grad_(False)
    optimizer = sgd(encoder)
    with go.attach(book=book, encoder=encoder, optimizer=optimizer, loader=loader) as run:
        for x, _ in run.steps(total=24):
            found = encoder(x)
            nearest = torch.cdist(found, book.weight).argmin(1)
            loss = (found - book(nearest)).square().mean() + (found - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                book.weight[nearest] = 0.9 * book.weight[nearest] + 0.1 * found
            go.log(run, loss=loss)
    go.end(book, encoder)


@shape("a hidden state carried from batch to batch, attached")
def hidden(go: Go) -> None:
    _recurrent(go, is_attached=True)


@shape("a hidden state carried from batch to batch")
def hidden_lost(go: Go) -> None:
    _recurrent(go, is_attached=False)


def _recurrent(go: Go, *, is_attached: bool) -> None:
    cell, head, loader = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 1), make_loader(shuffle=False)
    optimizer = sgd(cell, head)
    memory = {"h": torch.zeros(1, 1, 5)}
    more = {"memory": memory} if is_attached else {}
    with go.attach(cell=cell, head=head, optimizer=optimizer, loader=loader, **more) as run:
        for x, y in run.steps(total=24):
            out, h = cell(x[None], memory["h"])
            memory["h"] = h.detach()
            loss = (head(out)[0] - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(cell, head)


@shape("knowledge distillation from a frozen teacher")
def distillation(go: Go) -> None:
    model, teacher, loader = make_model(), make_model(drop=0.0).eval(), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, teacher=teacher, optimizer=optimizer, loader=loader, leave_out_frozen=True) as run:
        for x, _ in run.steps(total=24):
            with torch.no_grad():
                y = teacher(x)
            go.log(run, loss=step(model, optimizer, (x, y)))
    go.end(model)


@shape("a temperature that falls, in run.values")
def temperature(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    with go.attach(model=model, optimizer=optimizer, loader=loader, heat=2.0) as run:
        for x, y in run.steps(total=24):
            run.values["heat"] *= 0.95
            go.log(run, loss=step(model, optimizer, (x / run.values["heat"], y)), heat=run.values["heat"])
    go.end(model)


@shape("a temperature that falls, in a variable")
def temperature_lost(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = sgd(model)
    heat = 2.0
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for x, y in run.steps(total=24):
            heat *= 0.95
            go.log(run, loss=step(model, optimizer, (x / heat, y)), heat=heat)
    go.end(model)

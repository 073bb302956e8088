"""Shapes: optimizers, schedulers and precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.session.loops.table import SHAPES, Go, Shape, loss_of, make_loader, make_model, shape, step

OPTIMIZERS = {
    "SGD with Nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.05),
}
lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "StepLR": lambda o: lr.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [4, 9]),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 8),
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 5),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=24),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=5, mode="triangular2"),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 20),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda count: 1 / (1 + count)),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=6), lr.ConstantLR(o)], [7]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.95)]),
}


def _with_optimizer(make: Any) -> Any:
    def train(go: Go) -> None:
        model, loader = make_model(), make_loader()
        optimizer = make(model.parameters())
        with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
            for batch in run.steps(total=24):
                go.log(run, loss=step(model, optimizer, batch))
        go.end(model)

    return train


def _with_scheduler(make: Any) -> Any:
    def train(go: Go) -> None:
        model, loader = make_model(), make_loader()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        scheduler = make(optimizer)
        with go.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as run:
            for batch in run.steps(total=24):
                loss = step(model, optimizer, batch)
                scheduler.step()
                go.log(run, loss=loss, lr=optimizer.param_groups[0]["lr"])
        go.end(model)

    return train


for _name, _make in OPTIMIZERS.items():
    SHAPES[_name] = Shape(_name, _with_optimizer(_make))
for _name, _make in SCHEDULERS.items():
    SHAPES[_name] = Shape(_name, _with_scheduler(_make))


@shape("plateau with early stop")
def plateau(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    scheduler = lr.ReduceLROnPlateau(optimizer, patience=1)
    held_out = next(iter(make_loader(shuffle=False, batch_size=40)))
    with go.attach(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, best=1e9, bad=0) as run:
        for _ in run.epochs(8):
            for batch in run.steps():
                go.log(run, loss=step(model, optimizer, batch))
            with torch.no_grad():
                value = loss_of(model.eval(), held_out).item()
            model.train()
            scheduler.step(value)
            run.values["bad"] = 0 if value < run.values["best"] - 0.01 else run.values["bad"] + 1
            run.values["best"] = min(run.values["best"], value)
            if run.values["bad"] >= 2:
                break
    go.end(model)


@shape("LBFGS")
def lbfgs(go: Go) -> None:
    model, loader = make_model(drop=0.0), make_loader()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=15):

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            go.log(run, loss=optimizer.step(closure))
    go.end(model)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, with its own update or another optimizer inside."""

    def __init__(self, params: Any, base: Any = None, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.base = None if base is None else base(self.param_groups, lr=lr)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["e"] = 0.05 * p.grad
                p.add_(self.state[p]["e"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["e"])
                if self.base is None:
                    p.sub_(group["lr"] * p.grad)
        if self.base is not None:
            self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def _sam(go: Go, base: Any, *, by_closure: bool) -> None:
    model, loader = make_model(drop=0.0), make_loader()
    optimizer = SAM(model.parameters(), base)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            loss = loss_of(model, batch)
            loss.backward()
            if by_closure:
                optimizer.step(lambda batch=batch: loss_of(model, batch).backward())
            else:
                optimizer.first_step()
                loss_of(model, batch).backward()
                optimizer.second_step()
            go.log(run, loss=loss)
    go.end(model)


@shape("SAM by hand")
def sam_by_hand(go: Go) -> None:
    _sam(go, None, by_closure=False)


@shape("SAM around SGD with momentum, by hand")
def sam_around(go: Go) -> None:
    _sam(go, lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9), by_closure=False)


@shape("SAM around SGD with momentum, by closure")
def sam_by_closure(go: Go) -> None:
    _sam(go, lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9), by_closure=True)


@shape("gradient scaler")
def scaler(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
    with go.attach(model=model, optimizer=optimizer, scaler=scaler, loader=loader) as run:
        for batch in run.steps(total=24):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            go.log(run, loss=loss, scale=scaler.get_scale())
    go.end(model)


@shape("autocast to bf16")
def autocast(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=20):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            go.log(run, loss=loss)
    go.end(model)


@shape("two optimizers, one for each half")
def two_optimizers(go: Go) -> None:
    model, loader = make_model(), make_loader()
    halves = list(model.parameters())
    first, second = torch.optim.SGD(halves[:2], 0.05, momentum=0.9), torch.optim.Adam(halves[2:], 0.01)
    with go.attach(model=model, optimizers=[first, second], loader=loader) as run:
        for batch in run.steps(total=24):
            loss = loss_of(model, batch)
            model.zero_grad()
            loss.backward()
            first.step()
            second.step()
            go.log(run, loss=loss)
    go.end(model)


@shape("an optimizer that starts late")
def late_optimizer(go: Go) -> None:
    model, other, loader = make_model(), make_model(), make_loader()
    first, second = torch.optim.SGD(model.parameters(), 0.05), torch.optim.Adam(other.parameters(), 0.01)
    with go.attach(model=model, other=other, first=first, second=second, loader=loader) as run:
        for batch in run.steps(total=30):
            loss = step(model, first, batch)
            if run.batch >= 65:
                step(other, second, batch)
            go.log(run, loss=loss)
    go.end(model, other)


@shape("learning rate changed by hand")
def lr_by_hand(go: Go) -> None:
    model, loader = make_model(), make_loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            if run.step == 10:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.1
            go.log(run, loss=step(model, optimizer, batch), lr=optimizer.param_groups[0]["lr"])
    go.end(model)


@shape("a parameter group that is added")
def added_group(go: Go) -> None:
    model, loader = make_model(), make_loader()
    parts = list(model.parameters())
    optimizer = torch.optim.SGD(parts[2:], 0.05, momentum=0.9)
    with go.attach(model=model, optimizer=optimizer, loader=loader) as run:
        for batch in run.steps(total=24):
            if run.step == 10 and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": parts[:2], "lr": 0.01})
            go.log(run, loss=step(model, optimizer, batch))
    go.end(model)


@shape("a wrapper that is no optimizer")
def wrapper(go: Go) -> None:
    class Noam:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer, self.count = optimizer, 0

        def step(self) -> None:
            self.count += 1
            self.optimizer.param_groups[0]["lr"] = 0.1 / self.count
            self.optimizer.step()

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count, "optimizer": self.optimizer.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]
            self.optimizer.load_state_dict(state["optimizer"])

    model, loader = make_model(), make_loader()
    noam = Noam(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    with go.attach(model=model, noam=noam, loader=loader) as run:
        for batch in run.steps(total=12):
            loss = loss_of(model, batch)
            (loss / 2).backward()
            if run.batch % 2 == 1:
                noam.step()
                model.zero_grad()
            go.log(run, loss=loss)
    go.end(model)


@shape("sparse embedding with SparseAdam")
def sparse(go: Go) -> None:
    table, head = nn.Embedding(30, 4, sparse=True), nn.Linear(4, 1)
    first, second = torch.optim.SparseAdam(table.parameters(), 0.05), torch.optim.SGD(head.parameters(), 0.05)
    data = torch.utils.data.TensorDataset(torch.arange(40) % 30, torch.arange(40.0)[:, None] / 40)
    with go.attach(table=table, head=head, first=first, second=second, loader=make_loader(data)) as run:
        for x, y in run.steps(total=24):
            loss = (head(table(x)) - y).square().mean()
            first.zero_grad()
            second.zero_grad()
            loss.backward()
            first.step()
            second.step()
            go.log(run, loss=loss)
    go.end(table, head)

"""The table of loop shapes, and what a shape gets to work with.

A shape is a function that trains with `go.attach`, logs with `go.log` and ends with `go.end`. Each `go.log` is also a
point at which the process may end itself: DIE=17 SIGNAL=9 means with SIGKILL at the 17th.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jackline

SHAPES: dict[str, Shape] = {}  # filled by the modules below
MODULES = [
    f"tests.session.loops.{name}"
    for name in ("optimizers", "data", "streams", "counters", "games", "memory", "models", "strangers")
]


@dataclass(frozen=True)
class Shape:
    name: str
    train: Callable[[Go], None]


def shape(name: str) -> Callable[[Callable[[Go], None]], Callable[[Go], None]]:
    def enter(train: Callable[[Go], None]) -> Callable[[Go], None]:
        assert name not in SHAPES, name
        SHAPES[name] = Shape(name, train)
        return train

    return enter


class Go:
    """One attempt at a shape. Without attributes in a dict: its own counts are no state of the loop."""

    __slots__ = ("_die_at", "_points", "_signal", "_values")

    def __init__(self) -> None:
        self._points = 0
        self._die_at = int(os.environ.get("DIE") or 0)
        self._signal = int(os.environ.get("SIGNAL") or signal.SIGKILL)
        self._values = open("values.txt", "a", buffering=1)  # noqa: SIM115
        random.seed(3)
        numpy.random.seed(3)
        torch.manual_seed(3)
        torch.set_num_threads(1)

    def attach(self, **given: Any) -> Any:
        return jackline.attach(**{"name": "x", "save_every_steps": 3, "memory_guard": False, **given})

    def log(self, run: Any, **values: Any) -> None:
        """Writes the values down, bit for bit, and may be the end of this process."""
        if not self._points:
            print("began", flush=True)
        run.log(**values)
        for name, value in values.items():
            self._values.write(f"{run.name} {run.batch} {name} {number(value).hex()}\n")
        self._points += 1
        if self._points == self._die_at:
            os.kill(os.getpid(), self._signal)

    def end(self, *things: Any) -> None:
        """Prints what a whole run and an interrupted one must have in common."""
        digest = hashlib.sha256()
        for thing in things:
            values = thing.state_dict() if isinstance(thing, nn.Module) else thing
            digest.update(repr(plain(values)).encode())
        print("final", digest.hexdigest(), flush=True)
        print("points", self._points, flush=True)


def number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to_dense().detach().double().flatten().tolist()
    if isinstance(value, dict):
        return {str(word): plain(part) for word, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else repr(value)


# -- small parts that most shapes use -------------------------------------------------------------------------------


def make_data(count: int = 40, width: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def make_loader(data: Any = None, **more: Any) -> Any:
    data = make_data() if data is None else data
    given: dict[str, Any] = {"batch_size": 4, **more}
    if not {"sampler", "batch_sampler", "shuffle"} & set(given) and not hasattr(type(data), "__iter__"):
        given["shuffle"] = True
    if "batch_sampler" in given:
        del given["batch_size"]
    return DataLoader(data, **given)


def make_model(width: int = 4, drop: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Dropout(drop), nn.Linear(8, 1))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def step(model: nn.Module, optimizer: Any, batch: Any) -> torch.Tensor:
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def plain_loop(go: Go, loader: Any, *, total: int = 24, **more: Any) -> None:
    """The data are what a shape is about: everything else is plain."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with go.attach(model=model, optimizer=optimizer, loader=loader, **more) as run:
        for batch in run.steps(total=total):
            loss = step(model, optimizer, batch)
            go.log(run, loss=loss, first=batch[0].flatten()[0])
    go.end(model)


def sgd(*modules: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr, momentum=0.9)

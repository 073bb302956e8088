"""Shapes: streams, and loaders that are no DataLoader."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    IterableDataset,
    get_worker_info,
)

from tests.session.loops.table import Go, make_loader, plain_loop, shape


class Stream(IterableDataset):  # type: ignore[type-arg]
    """`order`: how its samples are ordered."""

    def __init__(self, order: str = "") -> None:
        self.order = order
        self.rng = random.Random(7)
        self.items = list(range(40))
        self.file: Any = open(os.devnull) if order == "file" else None  # noqa: SIM115

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        items = list(self.items)
        if self.order == "own generator":
            self.rng.shuffle(items)
        elif self.order == "global generator":
            random.shuffle(items)
        elif self.order == "kept list":
            self.items = items = self.items[13:] + self.items[:13]
        elif self.order == "the clock":
            random.Random(os.urandom(8)).shuffle(items)
        for index in items[info.id :: info.num_workers] if info else items:
            x = torch.full((4,), index / 40) + 0.1 * torch.rand(4)
            yield x, x.sum(0, keepdim=True)


class Resumable(Stream):
    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        items = self.items[number::count]
        while self.position < len(items):
            self.position += 1
            x = torch.full((4,), items[self.position - 1] / 40) + 0.1 * torch.rand(4)
            yield x, x.sum(0, keepdim=True)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Forgetful(Resumable):
    """Its state_dict leaves out what its order depends on."""

    def __iter__(self) -> Iterator[Any]:
        self.rng.shuffle(self.items)
        yield from super().__iter__()


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "a stream": ("", {}),
    "a stream shuffled by its own generator": ("own generator", {}),
    "a stream shuffled by the global generator": ("global generator", {}),
    "a stream that turns its list": ("kept list", {}),
    "a stream with an open file": ("file", {}),
    "a stream, two workers": ("own generator", {"num_workers": 2}),
    "a stream, persistent workers": ("own generator", {"num_workers": 1, "persistent_workers": True}),
    "a stream with a generator": ("global generator", {"num_workers": 1, "generator": 4}),
    "a stream ordered by the clock": ("the clock", {}),
    "a stream ordered by the clock, one worker": ("the clock", {"num_workers": 1}),
}


def _stream(go: Go, order: str, given: dict[str, Any]) -> None:
    given = dict(given)
    if "generator" in given:
        given["generator"] = torch.Generator().manual_seed(given["generator"])
    plain_loop(go, make_loader(Stream(order), **given))


for _name, (_order, _options) in STREAMS.items():
    shape(_name)(lambda go, order=_order, options=_options: _stream(go, order, options))


@shape("a stream that positions itself")
def resumable(go: Go) -> None:
    plain_loop(go, make_loader(Resumable()))


@shape("a stream that positions itself, two workers")
def resumable_with_workers(go: Go) -> None:
    plain_loop(go, make_loader(Resumable(), num_workers=2))


@shape("a stream that positions itself and forgets its order")
def forgetful(go: Go) -> None:
    plain_loop(go, make_loader(Forgetful()))


@shape("a stream read by another number of workers after each start")
def other_workers(go: Go) -> None:
    plain_loop(go, make_loader(Stream(), num_workers=_starts() % 3))


def _starts() -> int:
    """How often this shape was started in this folder before."""
    with open("starts.txt", "a+") as file:
        file.seek(0)
        count = len(file.read())
        file.write("x")
    return count


@shape("a loader of an own class")
def own_class(go: Go) -> None:
    class Batches:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(3)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(9):
                x = torch.from_numpy(self.rng.random((4, 4), dtype=np.float32))
                yield x, x.sum(1, keepdim=True)

    plain_loop(go, Batches())


@shape("a list of batches")
def batches(go: Go) -> None:
    plain_loop(go, list(make_loader(shuffle=False)))


@shape("a generator function, read once")
def generator(go: Go) -> None:
    def forever() -> Iterator[Any]:
        while True:
            x = torch.rand(4, 4)
            yield x, x.sum(1, keepdim=True)

    plain_loop(go, forever())

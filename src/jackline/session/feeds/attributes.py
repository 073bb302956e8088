"""The attributes of a user's sampler or dataset that change during training: read, saved and written back in place.

A sampler that shuffles a list of its own, weights that follow the losses, a level of difficulty: a pass over the data
depends on them, and a new process starts without the changes. Generators are not among them (own_generators.py), nor
objects of classes that are not known here: `is_complete` tells whether all was understood.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from jackline.session.feeds.trail import checksum

_MAX_BYTES = 1 << 28


class Attributes:
    """The attributes of `owners` that are plain values, by the number of the owner and the name."""

    def __init__(self, owners: Sequence[Any], data: Any = None) -> None:
        self._owners = [one for one in owners if isinstance(getattr(one, "__dict__", None), dict)]
        self._data = data  # the dataset that a sampler refers to: no state of the sampler
        self.is_complete = len(self._owners) == len(owners)
        self._at_attach = {name: checksum(value) for name, value in self._list()}

    def read(self) -> dict[str, Any]:
        """A copy of all of them; large ones are left out."""
        found, size = {}, 0
        for name, value in self._list():
            size += _size(value)
            if size <= _MAX_BYTES:
                found[name] = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        return found

    def changed(self, found: dict[str, Any]) -> dict[str, Any]:
        """Those of `found` that differ from what they were at `attach`: a new process does not have them."""
        return {name: value for name, value in found.items() if self._at_attach.get(name) != checksum(value)}

    def write(self, found: dict[str, Any]) -> None:
        """Set these again, in the same containers and tensors where that is possible."""
        for name, value in found.items():
            number, _, word = name.partition(".")
            if int(number) < len(self._owners):
                _write(self._owners[int(number)], word, copy.deepcopy(value))

    def _list(self) -> list[tuple[str, Any]]:
        found = []
        for number, owner in enumerate(self._owners):
            for word, value in vars(owner).items():
                if _is_plain(value):
                    found.append((f"{number}.{word}", value))
                elif not self._is_no_state(value):
                    self.is_complete = False
        return found

    def _is_no_state(self, value: Any) -> bool:
        if value is self._data or any(value is owner for owner in self._owners):
            return True
        harmless = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState, range, type)
        return isinstance(value, harmless) or hasattr(value, "__code__")


def _is_plain(value: Any, depth: int = 3) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and value.layout is torch.strided
    if isinstance(value, numpy.ndarray):
        return value.dtype.kind in "biuf"
    if not depth:
        return False
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return all(_is_plain(part, depth - 1) for part in value)
    if type(value) is dict:
        return all(_is_plain(word, 0) and _is_plain(part, depth - 1) for word, part in value.items())
    return type(value) is set and all(_is_plain(part, 0) for part in value)


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return int(value.nbytes)
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple):
        return 8 * len(value) if value and isinstance(value[0], int | float) else sum(map(_size, value))
    return sum(map(_size, value.values())) if isinstance(value, dict) else 8


def _write(owner: Any, word: str, value: Any) -> None:
    """In place, so that a loop that holds the same list or tensor sees it."""
    old = vars(owner).get(word)
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
        with torch.no_grad():
            old.copy_(value)
    elif isinstance(old, numpy.ndarray) and isinstance(value, numpy.ndarray) and old.shape == value.shape:
        old[...] = value
    elif type(old) is list and isinstance(value, list):
        old[:] = value
    elif type(old) is dict and isinstance(value, dict):
        old.clear()
        old.update(value)
    else:
        setattr(owner, word, value)

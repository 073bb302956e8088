"""Finds and seeds the generators that a dataset or sampler owns (`self.rng = numpy.random.default_rng(0)`).

rng.py owns the global ones. This module owns the search, which looks into attributes and small containers and changes
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from jackline.data.loader.order import mix

_MAX_DEPTH = 4
_MAX_ITEMS = 64  # of a container: a list of transforms is short, a list of file names is not


class OwnGenerators:
    """All generators reachable from some objects. `names` says where they were found."""

    def __init__(self, *owners: Any) -> None:
        found: dict[int, tuple[str, Any]] = {}
        for owner in owners:
            for name, generator in _search(owner, type(owner).__name__, _MAX_DEPTH, set()):
                found.setdefault(id(generator), (name, generator))
        self.names = [name for name, _ in found.values()]
        self._generators = [generator for _, generator in found.values()]

    def __bool__(self) -> bool:
        return bool(self._generators)

    def initial_seed(self) -> int:
        """The user's seed, as far as it is known: torch generators remember it, the others do not."""
        seeds = [one.initial_seed() for one in self._generators if isinstance(one, torch.Generator)]
        return mix(*seeds) if seeds else 0

    def seed(self, key: int) -> None:
        for number, generator in enumerate(self._generators):
            _seed(generator, mix(key, number) if number else key)

    def copy(self) -> list[Any]:
        return [_read(generator) for generator in self._generators]

    def put_back(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            _write(generator, state)


def _search(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Generator | random.Random | numpy.random.Generator | numpy.random.RandomState):
        if value is not getattr(random, "_inst", None):
            yield name, value
        return
    if depth == 0 or id(value) in seen or _is_plain(value):
        return
    seen.add(id(value))
    for word, part in _parts(value):
        yield from _search(part, f"{name}.{word}", depth - 1, seen)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(str(word), part) for word, part in value.items()] if len(value) <= _MAX_ITEMS else []
    if isinstance(value, list | tuple):
        return [(str(number), part) for number, part in enumerate(value)] if len(value) <= _MAX_ITEMS else []
    attributes = getattr(value, "__dict__", None)
    return list(attributes.items()) if isinstance(attributes, dict) else []


def _is_plain(value: Any) -> bool:
    """Whether it cannot refer to a generator: numbers, arrays, classes, functions."""
    if isinstance(value, str | bytes | int | float | torch.Tensor | numpy.ndarray | type):
        return True
    return callable(value) and (not hasattr(value, "__dict__") or hasattr(value, "__code__"))


def _seed(generator: Any, key: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(key >> 1)
    elif isinstance(generator, random.Random):
        generator.seed(key)
    elif isinstance(generator, numpy.random.RandomState):
        generator.seed((key ^ key >> 32) & 0xFFFFFFFF)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(key).state


def _read(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _write(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state

"""How the frames of a script spell its objects: `model`, `self.nets[0]`, `state.optimizer`.

Calls nothing of the user's: types are compared, attributes are read from dictionaries and slots, no property runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any

from torch import Tensor, nn

from jackline.checkpoint.state.attributes import unwrap

MAX_DEPTH = 3  # objects inside objects: `self.trainer.model`
MAX_OBJECTS = 20_000
MAX_CHILDREN = 200


@dataclass(frozen=True)
class Scope:
    """The variables of one frame. `is_own`: it is the user's file, not a library's."""

    file: str
    function: str
    line: int
    names: Mapping[str, Any]
    is_own: bool = True


@dataclass(frozen=True)
class Name:
    expression: str
    scope: Scope
    is_wrapper: bool = False


def name_objects(scopes: Sequence[Scope]) -> dict[int, Name]:
    """How the frames spell each object, shortest first: the user's own frames before those of libraries.

    `self.net` is shorter than `objects['net']`: a dictionary is often made for one call only. So of two dictionaries
    the one of the outer frame counts. `self` alone is the module whose own method runs: others have a name for it.
    """
    names: dict[int, Name] = {}
    outerness = {id(scope): 0.001 * number for number, scope in enumerate(scopes)}
    for is_own in (True, False):
        ticks = itertools.count()  # of two that are equally long, the one that was met first
        waiting = [
            (1.75 if name == "self" and nn.Module in type(value).__mro__ else 1.0, next(ticks), value, name, scope, 1)
            for scope in scopes
            if scope.is_own is is_own
            for name, value in scope.names.items()
        ]
        heapq.heapify(waiting)
        seen: set[int] = set()
        while waiting and len(seen) < MAX_OBJECTS:
            length, _, value, expression, scope, depth = heapq.heappop(waiting)
            if id(value) in seen:
                continue
            seen.add(id(value))
            named = unwrap(value) if nn.Module in type(value).__mro__ else value
            known = names.get(id(named))
            if known is None or (known.is_wrapper and named is value):
                names[id(named)] = Name(expression, scope, named is not value)
            if depth < MAX_DEPTH:
                for child, way in inside(value):
                    longer = length + (1.5 - outerness[id(scope)] if way.startswith("[") else 1.0)
                    heapq.heappush(waiting, (longer, next(ticks), child, f"{expression}{way}", scope, depth + 1))
    return names


def inside(value: Any) -> Iterator[tuple[Any, str]]:
    """What an object holds, with the spelling that leads there."""
    made = type(value)
    if made in (list, tuple):
        yield from ((item, f"[{index}]") for index, item in enumerate(value[:MAX_CHILDREN]))
    elif tuple in made.__mro__:  # a namedtuple
        fields = made.__dict__.get("_fields")
        names = fields if type(fields) is tuple else ()
        yield from ((item, f".{name}") for name, item in zip(names, tuple.__iter__(value), strict=False))
    elif dict in made.__mro__:
        for key, item in itertools.islice(list(dict.items(value)), MAX_CHILDREN):
            if type(key) in (str, int):
                yield item, f"[{key!r}]"
    elif nn.Module in made.__mro__ or Tensor in made.__mro__:
        return
    elif type in made.__mro__:
        stored = type.__getattribute__(value, "__dict__")
        if stored.get("__module__") == "__main__":  # of the script's own classes: `Config.model`
            yield from ((item, f".{name}") for name, item in list(stored.items())[:MAX_CHILDREN])
    else:
        yield from _attributes(value, made)


def _attributes(value: Any, made: type) -> Iterator[tuple[Any, str]]:
    """From its dictionary, and from the slots of its classes."""
    if made.__module__ in ("builtins", "threading", "logging"):
        return
    try:
        stored = object.__getattribute__(value, "__dict__")
    except Exception:
        stored = None
    if type(stored) is dict:
        yield from ((item, f".{name}") for name, item in list(stored.items())[:MAX_CHILDREN])
    for kind in made.__mro__:
        for name, slot in kind.__dict__.items() if "__slots__" in kind.__dict__ else ():
            if type(slot) is MemberDescriptorType:
                try:
                    yield slot.__get__(value), f".{name}"
                except AttributeError:  # not set
                    continue


def reached(scopes: Sequence[Scope], depth: int) -> Iterator[tuple[Any, str, Scope]]:
    """Objects of the user's own frames with their spelling and frame, each once."""
    waiting = deque(
        (value, name, scope, 1) for scope in scopes if scope.is_own for name, value in scope.names.items()
    )
    seen: set[int] = set()
    while waiting and len(seen) < MAX_OBJECTS:
        value, expression, scope, level = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value, expression, scope
        if level < depth:
            waiting += ((child, f"{expression}{way}", scope, level + 1) for child, way in inside(value))

"""Variables of the loop that training changes and no checkpoint holds: named while there is time to attach them.

Two steps, trained twice, show what the next step depends on (trial.py). A pool of images that is used once it is
full, a counter of bad epochs, or labels written into a dataset matter later. So the loop's variables are compared
after steps 1 and 2, and after the first step of the second epoch. A list of losses for a plot looks the same, so this
is a warning. It needs no copy of the process, so it works with GPUs too. Owns the comparison and its text.
"""

from __future__ import annotations

import ast
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from jackline.checkpoint.state.attributes import summarise
from jackline.session.saving.suspects import frames_of_loop, is_iterator, is_library, look_inside, source_of

_MAX_LEAVES = 300
_MAX_NAMES = 1_000
_MAX_MODULES = 50
_MAX_DEPTH = 3
_NAMED = 5
_PLAIN = (bool, int, float, complex, str)
_CONTAINERS = (list, dict, set, deque)
_STATES = (Tensor, numpy.ndarray, Optimizer, torch.Generator, random.Random, numpy.random.Generator)
_LONG = 10_000
_MAX_KNOWN = 200_000
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
Seen = dict[str, tuple[Any, str]]  # by name: what compares equal as long as it is the same, and text


class Loose:
    """Of one new run, during its first epoch. `event` reports."""

    def __init__(self, event: Callable[..., None]) -> None:
        self._event = event
        self._first: Seen = {}
        self._told: set[str] = set()
        self._epoch = 0
        self._is_over = False

    def look(self, step: int, epoch: int, attached: Mapping[str, Any]) -> None:
        """At the boundary after `step`."""
        is_new_epoch = epoch != self._epoch
        if self._is_over or not step or (step > 2 and not is_new_epoch):
            return
        self._epoch, self._is_over = epoch, is_new_epoch
        try:
            names = self._compare(_read(attached), is_first=step == 1)
        except Exception as problem:  # an object that cannot be read; it is the user's, and nothing depends on it
            self._is_over = True
            self._event("loose", f"the loop's variables cannot be read ({type(problem).__name__}: {problem})")
            return
        if names:
            self._event("loose", _text(names), is_loud=True)

    def _compare(self, now: Seen, *, is_first: bool) -> list[str]:
        before, self._first = self._first, now if is_first else self._first
        changed = [name for name in now if name in before and before[name][0] != now[name][0]]
        changed += [name for name in now if name not in before and name.rpartition(".")[0] in before]
        new = [name for name in changed if name not in self._told]
        self._told.update(new)
        return [f"{name} ({now[name][1]})" for name in new]


def _text(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"changes during training and is in no checkpoint, so a resume starts it over: {', '.join(names[:_NAMED])}"
        f"{more}. Attach it if a later step depends on it (attach(name=object), run.values)"
    )


def _read(attached: Mapping[str, Any]) -> Seen:
    known = _known(attached)
    found: Seen = {}
    for frame in frames_of_loop():
        fleeting = _fleeting(frame)
        for name, value in list(frame.f_locals.items()):
            if len(found) < _MAX_NAMES and not name.startswith("__") and name not in fleeting:
                _add(found, name, value, known, _MAX_DEPTH)
                for inside, part in look_inside(name, value):
                    _add(found, inside, part, known, 1)
    for module in _own_modules():
        for name, value in list(vars(module).items()):
            if len(found) < _MAX_NAMES and not name.startswith("__") and not isinstance(value, ModuleType):
                _add(found, f"{module.__name__}.{name}", value, known, 1)
    return found


def _known(attached: Mapping[str, Any]) -> set[int]:
    """Identities of what is saved: the attached objects, what they hold, and all parts of models."""
    found: set[int] = set()
    stack: list[Any] = list(attached.values())
    for frame in frames_of_loop():
        loaders = [value for value in frame.f_locals.values() if isinstance(value, DataLoader)]
        found.update(id(part) for loader in loaders for part in _read_by_feed(loader))
    found.discard(id(None))
    while stack and len(found) < _MAX_KNOWN:
        value = stack.pop()
        if id(value) in found:
            continue
        found.add(id(value))
        if isinstance(value, nn.Module):
            found.update(map(id, value.modules()), map(id, value.parameters()))
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, dict):
            stack += value.values()
        elif not isinstance(value, Tensor):
            stack += [part for part in getattr(value, "__dict__", {}).values() if _has_state(part)]
    return found


def _own_modules() -> list[ModuleType]:
    """Modules that the user has written, other than the script itself: its variables are those of a frame."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # not getattr: some import others for any attribute
        if name != "__main__" and isinstance(file, str) and not is_library(file):
            found.append(module)
    return found[:_MAX_MODULES]


def _has_state(value: Any) -> bool:
    if isinstance(value, nn.Module | Optimizer | list | tuple | dict):
        return True
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def _read_by_feed(loader: DataLoader[Any]) -> Iterator[Any]:
    """What the feed of a loader saves: its samplers, and a dataset that has a state."""
    yield loader
    yield from (part for part in (loader.sampler, loader.batch_sampler) if part is not None)
    yield getattr(loader.batch_sampler, "sampler", None)
    if callable(getattr(loader.dataset, "state_dict", None)):
        yield loader.dataset


def _add(found: Seen, name: str, value: Any, known: set[int], depth: int) -> None:
    """A variable, or the attributes of an object of the user's own class."""
    if id(value) in known or isinstance(value, type) or type(value).__module__.startswith("jackline."):
        return
    if isinstance(value, _PLAIN):
        found[name] = value, _shown(value)
    elif (summary := _summary(value, known)) is not None:
        found[name] = summary, f"a {type(value).__name__}"
    elif depth and _is_own(value):
        found[name] = type(value), ""
        known = {*known, id(value)}
        for word, part in list(vars(value).items()):
            _add(found, f"{name}.{word}", part, known, depth - 1)


def _summary(value: Any, known: set[int]) -> Any:
    """What compares equal as long as the value is the same; None for a value that is no state, or has attributes."""
    if is_iterator(value):
        return object()  # how far it is cannot be seen, but a loop that keeps one moves it on
    if isinstance(value, nn.Module):
        # A wrapper of a module that is saved has no parameters of its own.
        is_wrapper = all(id(one) in known for one in value.parameters()) and any(True for _ in value.parameters())
        return None if is_wrapper else summarise(value, known, [_MAX_LEAVES])
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return None  # made in this step
    if isinstance(value, _CONTAINERS) and len(value) > _LONG:
        return id(value), len(value)
    if isinstance(value, (*_CONTAINERS, *_STATES)):
        return summarise(value, known, [_MAX_LEAVES])
    is_stateful = callable(getattr(value, "state_dict", None))
    return summarise(value.state_dict(), known, [_MAX_LEAVES]) if is_stateful else None


def _is_own(value: Any) -> bool:
    """An object of a class that the user has written, or a dataset of tensors."""
    if isinstance(value, TensorDataset):
        return True
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__dict__", {}).get("__file__")
    is_main = type(value).__module__ == "__main__"
    is_written = is_main or (isinstance(file, str) and not is_library(file))
    return is_written and isinstance(getattr(value, "__dict__", None), dict)


def _fleeting(frame: FrameType) -> set[str]:
    """Names that every pass of the loop around the current line sets anew, without their old value."""
    tree = source_of(frame)
    if tree is None:
        return {name for name, value in frame.f_locals.items() if not isinstance(value, Dataset)}
    set_anew: set[str] = set()
    kept: set[str] = set()
    for loop in [node for node in ast.walk(tree) if isinstance(node, _LOOPS)]:
        if not loop.lineno <= frame.f_lineno <= (loop.end_lineno or loop.lineno):
            continue
        for node in ast.walk(loop):
            names, value = _set_by(node)
            read = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)} if value is not None else set()
            set_anew |= names - read
            kept |= names & read
    return set_anew - kept


def _set_by(node: ast.AST) -> tuple[set[str], ast.AST | None]:
    """The names that a statement sets, and from what."""
    if isinstance(node, ast.AugAssign):
        return set(_names(node.target)), node.target
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        return set(_names(node.target)), None
    if isinstance(node, ast.Assign):
        return {name for target in node.targets for name in _names(target)}, node.value
    if isinstance(node, ast.AnnAssign | ast.NamedExpr):
        return set(_names(node.target)), node.value
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        return set(_names(node.optional_vars)), None
    return set(), None


def _names(target: ast.AST) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _names(part)
    elif isinstance(target, ast.Starred):
        yield from _names(target.value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 30 else text[:27] + "..."

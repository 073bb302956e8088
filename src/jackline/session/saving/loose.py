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
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

from jackline.checkpoint.state.attributes import summarise
from jackline.session.saving.suspects import (
    frames_of_loop,
    is_iterator,
    is_library,
    look_inside,
    nodes_around,
    source_of,
)

_MAX_LEAVES = 300
_MAX_NAMES = 1_000
_MAX_MODULES = 50
_MAX_DEPTH = 3
_NAMED = 5
_PLAIN = (bool, int, float, complex, str)
_CONTAINERS = (list, dict, set, deque)
_STATES = (Tensor, numpy.ndarray, Optimizer, nn.Module, torch.Generator, random.Random, numpy.random.Generator)
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
        self._fleeting: dict[tuple[CodeType, int], frozenset[str]] = {}  # by line: parsed once, looked at three times
        self._epoch = 0
        self._is_over = False

    def look(self, step: int, epoch: int, attached: Mapping[str, Any]) -> None:
        """At the boundary after `step`."""
        is_new_epoch = epoch != self._epoch
        if self._is_over or not step or (step > 2 and not is_new_epoch):
            return
        self._epoch, self._is_over = epoch, is_new_epoch
        try:
            names = self._compare(self._read(attached), is_first=step == 1)
        except Exception as problem:  # an object that cannot be read; it is the user's, and nothing depends on it
            self._is_over = True
            self._event("loose", f"the loop's variables cannot be read ({type(problem).__name__}: {problem})")
            return
        if names:
            self._event("loose", _text(names), is_loud=True)

    def _read(self, attached: Mapping[str, Any]) -> Seen:
        known = _known(attached)
        found: Seen = {}
        for frame in frames_of_loop():
            fleeting = self._fleeting_in(frame)
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

    def _fleeting_in(self, frame: FrameType) -> frozenset[str]:
        line = frame.f_code, frame.f_lineno
        if line not in self._fleeting:
            tree = source_of(frame)
            if tree is None:
                return frozenset(name for name, value in frame.f_locals.items() if not isinstance(value, Dataset))
            self._fleeting[line] = _fleeting(tree, frame.f_lineno)
        return self._fleeting[line]

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
    script = sys.modules.get("__main__")  # multiprocessing lists it as __mp_main__ too
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")  # not getattr: some import others for any attribute
        is_startup = name in ("sitecustomize", "usercustomize")
        if module is not script and not is_startup and isinstance(file, str) and not is_library(file):
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
        found[name] = value if value == value else "nan", _shown(value)
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
    if _is_wrapper(value, known):
        return None
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return None  # made in this step
    if isinstance(value, _CONTAINERS) and len(value) > _LONG:
        return id(value), len(value)
    if isinstance(value, (*_CONTAINERS, *_STATES)):
        return summarise(value, known, [_MAX_LEAVES])
    is_stateful = callable(getattr(value, "state_dict", None))
    return summarise(value.state_dict(), known, [_MAX_LEAVES]) if is_stateful else None


def _is_wrapper(value: Any, known: set[int]) -> bool:
    """Whether it is another form of an object that is saved: a compiled module, accelerate's optimizer."""
    if isinstance(value, nn.Module):
        parameters = list(value.parameters())
        return bool(parameters) and all(id(one) in known for one in parameters)
    held = [part for part in getattr(value, "__dict__", {}).values() if id(part) in known]
    if isinstance(value, Optimizer):
        return any(isinstance(part, Optimizer) for part in held)
    return any(isinstance(part, LRScheduler) for part in held)


def _is_own(value: Any) -> bool:
    """An object of a class that the user has written, or a dataset of tensors."""
    if isinstance(value, TensorDataset):
        return True
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__dict__", {}).get("__file__")
    is_main = type(value).__module__ == "__main__"
    is_written = is_main or (isinstance(file, str) and not is_library(file))
    return is_written and isinstance(getattr(value, "__dict__", None), dict)


def _fleeting(tree: ast.AST, line: int) -> frozenset[str]:
    """Names that each pass of the loops around a line sets before it reads them."""
    stored: set[str] = set()
    read_first: set[str] = set()
    for loop in [node for node in (tree, *nodes_around(tree, line)) if isinstance(node, _LOOPS)]:
        flow = _Flow()
        flow.visit(loop)
        stored |= flow.stored
        read_first |= flow.read_first
    return frozenset(stored - read_first)


class _Flow(ast.NodeVisitor):
    """In which order a piece of code reads and sets names. Bodies of inner loops are taken to run."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.read_first: set[str] = set()
        self._is_set: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read_first |= {node.id} - self._is_set
        else:
            self.stored.add(node.id)
            self._is_set.add(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit(node.value, *node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit(*([node.value] if node.value is not None else []), node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._visit(node.value, node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.read_first |= {node.target.id} - self._is_set
        self._visit(node.value, node.target)

    def visit_For(self, node: ast.For) -> None:
        self._visit(node.iter, node.target, *node.body, *node.orelse)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = set(self._is_set)
        self._visit(*node.body)
        after, self._is_set = self._is_set, before
        self._visit(*node.orelse)
        self._is_set &= after

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._visit_inside(node.generators, node.elt)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._visit_inside(node.generators, node.elt)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._visit_inside(node.generators, node.elt)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_inside(node.generators, node.key, node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """What a function reads is not known before it is called."""

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass

    def _visit(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self.visit(node)

    def _visit_inside(self, generators: list[ast.comprehension], *values: ast.AST) -> None:
        """A comprehension has names of its own."""
        before, stored = set(self._is_set), set(self.stored)
        for one in generators:
            self._visit(one.iter, one.target, *one.ifs)
        self._visit(*values)
        self._is_set, self.stored = before, stored


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 30 else text[:27] + "..."

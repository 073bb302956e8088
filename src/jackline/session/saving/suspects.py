"""Variables of the person's own loop that two steps have changed and that no checkpoint holds: names for an error.

Reads the frames that lead to `run.steps()`: their variables, the globals of their modules, what their functions close
over, and class attributes. It cannot tell which of them a step depends on, so it only names them.
"""

from __future__ import annotations

import ast
import io
import linecache
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jackline.checkpoint.state.attributes import open_value, summarise

_MAX_FRAMES = 6
_MAX_NAMES = 2_000
_MAX_LEAVES = 300
_STARTING = ("enumerate", "range", "count", "islice")
_RUN = "jackline.session.run"
_OURS = str(Path(__file__).resolve().parents[2])
Summaries = dict[str, tuple[int, Any, str]]  # by name: rank, summary, text


def read_variables(attached: Mapping[str, Any]) -> Summaries:
    """What the loop's variables are now. Objects that are attached are left out."""
    known = set(map(id, attached.values()))
    found: Summaries = {}
    for name, value in _variables():
        if len(found) > _MAX_NAMES:
            break
        if is_iterator(value):  # how far it is cannot be seen, but a loop that keeps one moves it on
            found[name] = (_rank(value), object(), _shown(value))
            continue
        for part in open_value("", name, value, set(known), 2):
            if part.path not in found and not _is_passing(part.value):
                text = _shown(part.value)
                found[part.path] = (_rank(part.value), summarise(part.value, known, [_MAX_LEAVES]), text)
    return found


def name_changed(before: Summaries, now: Summaries, limit: int = 6) -> list[str]:
    """'counter (0 -> 2)' for what has changed, optimizers and models first, numbers next."""
    changed = [name for name in now if name in before and before[name][1] != now[name][1]]
    changed += [name for name in now if name not in before and now[name][0] == 0]
    changed.sort(key=lambda name: now[name][0])
    found = []
    for name in changed[:limit]:
        was, has_become = before.get(name, (0, 0, "absent"))[2], now[name][2]
        found.append(f"{name} ({was} -> {has_become})" if was != has_become else f"{name} ({has_become})")
    return found


def starts_from_run() -> bool:
    """Whether the loop's source starts a counter of its own from `run.step` or `run.epoch`.

    Such a counter is right after a resume, though no checkpoint holds it: `enumerate(run.steps(), run.step)`.
    """
    for frame in frames_of_loop():
        tree = source_of(frame)
        if tree is None:
            return True  # it cannot be read, so nothing is claimed about it
        runs = {name for name, value in frame.f_locals.items() if type(value).__module__ == _RUN} | {"run"}
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if any(_is_start(node, called, runs) for node in ast.walk(tree)):
            return True
    return False


def source_of(frame: types.FrameType) -> ast.AST | None:
    """The function that this frame runs, or its module; None where there is no source."""
    try:
        tree: ast.AST = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):
        return None
    if frame.f_code.co_name == "<module>":
        return tree if getattr(tree, "body", None) else None
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    around = [node for node in nodes_around(tree, frame.f_lineno) if isinstance(node, kinds)]
    return max(around, key=lambda node: node.lineno, default=None)


def nodes_around(tree: ast.AST, line: int) -> Iterator[ast.AST]:
    """The statements and expressions of which `line` is a part. The rest of a long file is not looked into."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.stmt | ast.expr):
            yield from nodes_around(node, line)
            continue
        first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", ()))])
        if first <= line <= (node.end_lineno or node.lineno):
            yield node
            yield from nodes_around(node, line)


def _is_start(node: ast.AST, called: set[int], runs: set[str]) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.Return):
        return node.value is not None and any(_is_place(part, called, runs) for part in ast.walk(node.value))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        parts = [part for value in values for part in ast.walk(value)]
        return name in _STARTING and any(_is_place(part, called, runs) for part in parts)
    return False


def _is_place(node: ast.AST, called: set[int], runs: set[str]) -> bool:
    """`run.step` is read, also `self.run.step`; but `optimizer.step()` is called, and `self.step` is another one."""
    if not isinstance(node, ast.Attribute) or node.attr not in ("step", "epoch", "batch") or id(node) in called:
        return False
    owner = node.value
    return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) in runs


def _variables() -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for frame in frames_of_loop():
        for names in (frame.f_locals, frame.f_globals):
            for name, value in list(names.items()):
                if name.startswith("__") or isinstance(value, types.ModuleType):
                    continue
                yield name, value
                if id(value) not in seen:
                    seen.add(id(value))
                    yield from look_inside(name, value)


def look_inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a function closes over, and the attributes of a function or class of the loop's own module."""
    if isinstance(value, types.FunctionType) and not is_library(value.__code__.co_filename):
        for word, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():
                yield f"{name}: {word}", cell.cell_contents
        yield from ((f"{name}.{word}", part) for word, part in vars(value).items())
    elif isinstance(value, type) and value.__module__ == "__main__":
        own = [(word, part) for word, part in list(vars(value).items()) if not word.startswith("__")]
        yield from ((f"{name}.{word}", part) for word, part in own if not callable(part))


def frames_of_loop() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe()
    count = 0
    while frame is not None and count < _MAX_FRAMES:
        if not is_library(frame.f_code.co_filename):
            count += 1
            yield frame
        frame = frame.f_back


def is_library(file: str) -> bool:
    return file.startswith((_OURS, "<frozen", sys.prefix, sys.base_prefix)) or "site-packages" in file


def _is_passing(value: Any) -> bool:
    """A loss, an output, a batch: made anew in every step."""
    return isinstance(value, Tensor) and (value.grad_fn is not None or not isinstance(value, nn.Parameter))


def is_iterator(value: Any) -> bool:
    if not isinstance(value, Iterator) or isinstance(value, io.IOBase):
        return False
    return not (isinstance(value, types.GeneratorType) and is_library(value.gi_code.co_filename))


def _rank(value: Any) -> int:
    if isinstance(value, torch.optim.Optimizer | nn.Module):
        return 0
    return 1 if isinstance(value, int | float | str | bool) else 2


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= 30 else text[:27] + "..."

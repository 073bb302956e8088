"""Variables of the person's own loop that two steps have changed and that no checkpoint holds: names for an error.

Reads the frames that lead to `run.steps()`: their variables, the globals of their modules, what their functions close
over, and class attributes. It cannot tell which of them a step depends on, so it only names them.
"""

from __future__ import annotations

import ast
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
_OURS = str(Path(__file__).resolve().parents[2])
Summaries = dict[str, tuple[int, Any, str]]  # by name: rank, summary, text


def read_variables(attached: Mapping[str, Any]) -> Summaries:
    """What the loop's variables are now. Objects that are attached are left out."""
    known = set(map(id, attached.values()))
    found: Summaries = {}
    for name, value in _variables():
        if len(found) > _MAX_NAMES:
            break
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
    for file in {frame.f_code.co_filename for frame in _frames()}:
        try:
            tree = ast.parse("".join(linecache.getlines(file)))
        except (SyntaxError, ValueError):
            return True  # it cannot be read, so nothing is claimed about it
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if any(_is_start(node, called) for node in ast.walk(tree)):
            return True
    return False


def _is_start(node: ast.AST, called: set[int]) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.Return):
        return node.value is not None and any(_is_place(part, called) for part in ast.walk(node.value))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        return name in _STARTING and any(_is_place(part, called) for value in values for part in ast.walk(value))
    return False


def _is_place(node: ast.AST, called: set[int]) -> bool:
    """`run.step` is read; `optimizer.step()` is called."""
    return isinstance(node, ast.Attribute) and node.attr in ("step", "epoch") and id(node) not in called


def _variables() -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for frame in _frames():
        for names in (frame.f_locals, frame.f_globals):
            for name, value in list(names.items()):
                if name.startswith("__") or isinstance(value, types.ModuleType):
                    continue
                yield name, value
                if id(value) not in seen:
                    seen.add(id(value))
                    yield from _inside(name, value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a function closes over, and the attributes of a function or class of the loop's own module."""
    if isinstance(value, types.FunctionType) and not _is_library(value.__code__.co_filename):
        for word, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():
                yield f"{name}: {word}", cell.cell_contents
        yield from ((f"{name}.{word}", part) for word, part in vars(value).items())
    elif isinstance(value, type) and value.__module__ == "__main__":
        own = [(word, part) for word, part in list(vars(value).items()) if not word.startswith("__")]
        yield from ((f"{name}.{word}", part) for word, part in own if not callable(part))


def _frames() -> Iterator[types.FrameType]:
    frame: types.FrameType | None = sys._getframe()
    count = 0
    while frame is not None and count < _MAX_FRAMES:
        if not _is_library(frame.f_code.co_filename):
            count += 1
            yield frame
        frame = frame.f_back


def _is_library(file: str) -> bool:
    return file.startswith((_OURS, "<frozen", sys.prefix, sys.base_prefix)) or "site-packages" in file


def _is_passing(value: Any) -> bool:
    """A loss, an output, a batch: made anew in every step."""
    return isinstance(value, Tensor) and (value.grad_fn is not None or not isinstance(value, nn.Parameter))


def _rank(value: Any) -> int:
    if isinstance(value, torch.optim.Optimizer | nn.Module):
        return 0
    return 1 if isinstance(value, int | float | str | bool) else 2


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= 30 else text[:27] + "..."

"""Python attributes of callbacks and modules that change while a framework trains: counters, lists, averages.

Frameworks save what an object declares (state_dict, ExportableState). Attributes that are not declared would start
over at a resume: patience counters, lists of outputs, an average of the weights. So they are compared with what they
were when training began, and those that differ are saved and put back. What has not changed (paths, settings, a
process number) stays as the program sets it. Owns what counts as a change; the checkpoint's format says what can be
saved.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy
import torch

from jackline.checkpoint.format.tree import KIND
from jackline.checkpoint.state.attributes import MAX_LEAVES, summarise
from jackline.checkpoint.state.capture import capture
from jackline.errors import CannotResume

_STATEFUL = "jackline: state_dict of "
_CODE = (types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
Known = Collection[int]  # ids of objects that are saved elsewhere: the model, its parts, optimizers


class Watched:
    """One object and the attributes it had when training began. `known`: ids of what is saved elsewhere."""

    def __init__(self, name: str, thing: Any, *, known: Known, skip: Collection[str] = ()) -> None:
        self.name = name
        self._thing = thing
        self._known = known
        self._skip = frozenset(skip)
        self._before = {word: _mark(value) for word, value in self._attributes().items()}
        self.not_saved: list[str] = []  # names of attributes that change and cannot be saved, newest save
        self._reported: set[str] = set()

    def changed(self) -> dict[str, Any]:
        """The attributes that differ from what they were, ready to be saved."""
        found: dict[str, Any] = {}
        self.not_saved = []
        for word, value in self._attributes().items():
            if word in self._before and _is_same(self._before[word], value):
                continue
            content = {_STATEFUL + type(value).__name__: value.state_dict()} if _is_stateful(value) else value
            if _can_be_saved(content):
                found[word] = content
            else:
                self.not_saved.append(word)
        return found

    def report_unsaved(self, report: Callable[[str], None], hint: str) -> None:
        """Name what the newest save could not hold, each attribute once."""
        for word in self.not_saved:
            if word not in self._reported:
                self._reported.add(word)
                what = f"{self.name}: '{word}' changes during training and cannot be saved"
                report(f"{what}, so a resume starts it over; {hint}")

    def put_back(self, values: Mapping[str, Any]) -> None:
        for word, value in values.items():
            inner = _stateful_part(value)
            if inner is None:
                setattr(self._thing, word, value)
                continue
            live: Any = getattr(self._thing, word, None)
            if not _is_stateful(live):
                raise CannotResume(
                    f"{self.name} has no '{word}' yet, whose state was saved",
                    hint=f"create '{word}' before training begins",
                )
            live.load_state_dict(inner)

    def _attributes(self) -> dict[str, Any]:
        found = {}
        for word, value in list(vars(self._thing).items()):
            if word in self._skip or isinstance(value, _CODE) or _refers(value, self._known):
                continue
            found[word] = value
        return found


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _stateful_part(value: Any) -> Any:
    if isinstance(value, dict) and len(value) == 1:
        word, inner = next(iter(value.items()))
        if isinstance(word, str) and word.startswith(_STATEFUL):
            return inner
    return None


def _refers(value: Any, known: Known) -> bool:
    """Whether it is, or holds, something that is saved elsewhere."""
    if id(value) in known:
        return True
    if isinstance(value, dict):
        return any(id(one) in known for one in value.values())
    return isinstance(value, list | tuple | set | deque) and any(id(one) in known for one in value)


def _can_be_saved(value: Any) -> bool:
    """Whether it can be saved and created again from the checkpoint alone."""
    try:
        return not _needs_live_object(capture({"value": value}).tree)
    except Exception:  # CannotSave, or a property of somebody else's
        return False


def _needs_live_object(node: Any) -> bool:
    if isinstance(node, list):
        return any(map(_needs_live_object, node))
    if not isinstance(node, dict):
        return False
    return node.get(KIND) in ("module", "optimizer", "stateful") or any(map(_needs_live_object, node.values()))


def _mark(value: Any) -> Any:
    """What tells later whether `value` has changed; None for objects whose state is always saved."""
    return None if _is_stateful(value) or _has_tensors(value) else summarise(value, set(), [MAX_LEAVES])


def _is_same(mark: Any, value: Any) -> bool:
    return bool(mark is not None and mark == _mark(value))


def _has_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return True
    if isinstance(value, dict):
        return any(_has_tensors(one) for one in value.values())
    return isinstance(value, list | tuple | set) and any(_has_tensors(one) for one in value)

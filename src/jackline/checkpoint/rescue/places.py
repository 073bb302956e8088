"""Where lines that load a rescued state could stand: the frames of the user's own code.

A script that calls `train(model, optimizer, epoch)` in a loop knows the model in two frames, and only in the outer
one are lines run once. Which frame has the loop is in the source, which is read later (`cli/rescue/patch`). Here is
noted, while the frames exist, what each of them calls the parts, and the numbers that it counts with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from jackline.checkpoint.rescue.live import Part
from jackline.checkpoint.rescue.names import Scope, inside, name_objects

MAX_PLACES = 8
MAX_VALUES = 200
MAX_TEXT = 200
MAX_LOOKED_INTO = 50  # objects of a frame whose numbers are noted too: `self.step`, `state["step"]`
_NUMBERS = (bool, int, float)


def list_places(scopes: Sequence[Scope], parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The innermost frame first. {"file", "function", "line", "names": {key: expression}, "wrapped": [key],
    "values": {expression: number}}."""
    found = []
    for scope in [one for one in scopes if one.is_own][:MAX_PLACES]:
        names = name_objects([scope])
        known = {part.key: names[id(part.value)] for part in parts if id(part.value) in names}
        found.append(
            {
                "file": scope.file,
                "function": scope.function,
                "line": scope.line,
                "names": {key: name.expression for key, name in known.items()},
                "wrapped": [key for key, name in known.items() if name.is_wrapper],
                "values": dict(_numbers_of(scope)) if known else {},
            }
        )
    return found


def _numbers_of(scope: Scope) -> Iterator[tuple[str, Any]]:
    """Numbers and words of a frame, then the numbers in its objects. Words in objects may be secrets of a config."""
    num_left, looked_into = MAX_VALUES, 0
    for name, value in scope.names.items():
        plain = value if type(value) is str and len(value) <= MAX_TEXT else _number(value)
        if num_left > 0 and not name.startswith("__") and plain is not None:
            num_left -= 1
            yield name, plain
    for name, value in scope.names.items():
        if name.startswith("__") or type(value) in (str, *_NUMBERS) or looked_into >= MAX_LOOKED_INTO:
            continue
        looked_into += 1
        for item, way in inside(value):
            if num_left > 0 and (plain := _number(item)) is not None:
                num_left -= 1
                yield f"{name}{way}", plain


def _number(value: Any) -> Any:
    """A number as Python's own, also that of numpy and that of a tensor on the host: `best = losses.mean()`."""
    made = type(value)
    is_scalar = made is Tensor and value.dim() == 0 and value.device.type == "cpu"
    if is_scalar or (made.__module__ == "numpy" and any(one.__name__ == "number" for one in made.__mro__)):
        value = value.item()
    return value if type(value) in _NUMBERS and math.isfinite(value) else None

"""Values of small tensors on the meta device: positions, masks, ids and whatever a model computes from them.

A model asks questions of its small tensors: is this mask all ones, how many tokens does this expert get. A meta
tensor has no values, so each small one whose value follows from known ones keeps that value beside it, on the CPU.
Everything large stays without.

Owns which values are known and what is assumed where they are not. `questions` owns the Python calls that ask
(`item`, `bool`, indexing by a number), `shapes` the operators whose result is shaped by values.

Where the answer depends on real data, an assumption takes its place and is noted with the line that asked:

- the experts that a router chooses: spread evenly, or (`Routing`) all tokens to the same ones,
- a selection by an unknown mask: everything is selected, which is the most memory; a count of it is of everything,
- `any()` of unknown values is false and `all()` is true: no infinities, no padding.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Routing = Literal["even", "one-sided"]
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# A value costs the time of its operators on the CPU. Whole-number tensors decide shapes and branches; of the others
# only the smallest do (rates of stochastic depth, schedules).
MOST_WHOLE, _MOST_FRACTIONS = 2**19, 2**12
ATTRIBUTE = "_jackline_value"
_OURS = ("/jackline/memory/", "/torch/")


@dataclass(frozen=True)
class Value:
    """`assumed` is empty for a value that is certain, otherwise what it rests on."""

    tensor: Tensor
    assumed: str = ""


@dataclass
class Values:
    """`notes`: what was assumed in order to answer a question, by line of code, in order."""

    routing: Routing = "even"
    notes: dict[str, None] = field(default_factory=dict)
    is_routed: bool = False  # a shape or a branch depended on the choice of experts

    def run(self, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`run(func, args, kwargs)` on the meta device; its result gets a value where that is known."""
        result = run(func, args, kwargs)
        if type(result) is Tensor:
            if result.is_meta and result.numel() <= most(result):
                keep(result, self.computed(func, args, kwargs), func, args)
        elif isinstance(result, tuple | list):
            self._keep_each(result, func, args, kwargs)
        return result

    def _keep_each(self, results: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(isinstance(one, Tensor) and one.is_meta and one.numel() <= most(one) for one in results):
            return
        found = self.computed(func, args, kwargs)
        parts = found.tensor if found is not None else None
        if isinstance(parts, tuple | list):
            for one, part in zip(results, parts, strict=True):
                if isinstance(one, Tensor) and one.is_meta and isinstance(part, Tensor):
                    setattr(one, ATTRIBUTE, Value(part, found.assumed if found else ""))
            return
        assumption = _ASSUMED.get(func.overloadpacket)
        if assumption is not None:
            assumption(self, results, args, kwargs)

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value | None:
        """The operator on the values; None where one of them is unknown."""
        name = func.overloadpacket
        if name in _EMPTY:
            if not args or isinstance(args[0], Tensor):
                return None
            return Value(torch.zeros(args[0], dtype=kwargs.get("dtype"), device="cpu"))
        assumed: dict[str, None] = {}
        try:
            known_args, known_kwargs = known_of(args, assumed), known_of(kwargs, assumed)
        except UnknownValue:
            return self._assumed_scalar(func, args)
        if "device" in known_kwargs:
            known_kwargs["device"] = torch.device("cpu")
        try:
            with torch.no_grad():
                found = func(*known_args, **known_kwargs)
                return Value(found.zero_() if name in _UNFILLED else found, next(iter(assumed), ""))
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            return None

    def _assumed_scalar(self, func: Any, args: tuple[Any, ...]) -> Value | None:
        """`any` and `all` of unknown values; how many are true; the index of the largest one, which is how a router
        chooses one. All count as finite."""
        name = func.overloadpacket
        if (is_so := _about_finite(name, args)) is not None:
            return Value(torch.full(args[0].shape, is_so, dtype=torch.bool, device="cpu"))
        if name in _TRUTHS or name is torch.ops.aten.argmax:
            return _of_unknown(self, name, args)
        is_counted = name in (torch.ops.aten.sum, torch.ops.aten.count_nonzero) and args[0].dtype == torch.bool
        if is_counted and args[0].numel() <= MOST_WHOLE:
            return Value(func(torch.ones(args[0].shape, dtype=torch.bool, device="cpu"), *args[1:]), EVERYTHING)
        return None

    # Answers.

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The tensor's value if it is known or assumed, for a question: an assumption that it rests on is noted."""
        if not tensor.is_meta:
            return tensor
        found: Value | None = getattr(tensor, ATTRIBUTE, None)
        if found is None:
            return None
        if found.assumed:
            self.note(found.assumed)
        return found.tensor

    def note(self, assumed: str) -> None:
        if assumed == ROUTED:
            self.is_routed = True
            words = (
                "tokens spread evenly over the experts"
                if self.routing == "even"
                else "all tokens to the same experts"
            )
            self.notes.setdefault(f"{words} ({asking_line()})")
        else:
            self.notes.setdefault(f"{assumed} ({asking_line()})")

    def assume(self, tensor: Tensor) -> Tensor:
        """A value for an unknown tensor that the program wants to read: zeros."""
        self.note(f"a value that is read is {'false' if tensor.dtype == torch.bool else '0'}")
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


ROUTED = "the choice of experts"
EVERYTHING = "an unknown mask selects everything"


class UnknownValue(Exception):
    pass


def keep_value(tensor: Tensor, value: Tensor) -> None:
    """Let a meta tensor carry a value that is known from elsewhere."""
    if tensor.is_meta and tensor.numel() <= most(tensor):
        setattr(tensor, ATTRIBUTE, Value(value))


def known_value(tensor: Tensor) -> Tensor | None:
    """What a tensor holds, or what a meta tensor carries, where that is certain and small."""
    if not tensor.is_meta:
        return tensor.detach().cpu() if tensor.numel() <= most(tensor) else None
    found: Value | None = getattr(tensor, ATTRIBUTE, None)
    return found.tensor if found is not None and not found.assumed else None


def forget_value(tensor: Tensor) -> None:
    if hasattr(tensor, ATTRIBUTE):
        delattr(tensor, ATTRIBUTE)


def keep(tensor: Tensor, value: Value | None, func: Any, args: tuple[Any, ...]) -> None:
    if value is not None:
        setattr(tensor, ATTRIBUTE, value)
    elif args and tensor is args[0] and hasattr(tensor, ATTRIBUTE):
        delattr(tensor, ATTRIBUTE)  # an operator in place has written something unknown


def most(tensor: Tensor) -> int:
    return _MOST_FRACTIONS if tensor.is_floating_point() or tensor.is_complex() else MOST_WHOLE


def known_of(value: Any, assumed: dict[str, None]) -> Any:
    """The same arguments with values in place of meta tensors."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            return value
        found: Value | None = getattr(value, ATTRIBUTE, None)
        if found is None or not isinstance(found.tensor, Tensor):
            raise UnknownValue
        if found.assumed:
            assumed.setdefault(found.assumed)
        return found.tensor
    if isinstance(value, list | tuple):
        return type(value)(known_of(item, assumed) for item in value)
    if isinstance(value, dict):
        return {key: known_of(item, assumed) for key, item in value.items()}
    return value


def asking_line() -> str:
    """The line of code that asked: the innermost that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in _OURS):
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "unknown line"


# Assumptions about unknown values.


def _spread(values: Values, shape: tuple[int, ...], dim: int, num_choices: int) -> Tensor:
    """`shape[dim]` different choices in every row: evenly spread over all, or the same ones in every row."""
    wanted = shape[dim] if shape else 1
    rows = 1
    for size in shape:
        rows *= size
    rows //= max(1, wanted)
    chosen = torch.arange(wanted, device="cpu").expand(rows, wanted)
    if values.routing == "even":
        chosen = (chosen + wanted * torch.arange(rows, device="cpu")[:, None]) % max(1, num_choices)
    if not shape:
        return chosen.reshape(())
    others = [size for at, size in enumerate(shape) if at != dim % len(shape)]
    return chosen.reshape(*others, wanted).movedim(-1, dim)


def _assume_topk(values: Values, results: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    source, dim = args[0], args[2] if len(args) > 2 else -1
    indices = results[1]
    if indices.is_meta and indices.numel() <= MOST_WHOLE and source.dim():
        chosen = _spread(values, tuple(indices.shape), dim, source.shape[dim])
        setattr(indices, ATTRIBUTE, Value(chosen, ROUTED))


def _assume_sorted(values: Values, results: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    indices = results[1]
    if indices.is_meta and indices.numel() <= MOST_WHOLE and indices.dim():
        dim = kwargs.get("dim", args[-2] if len(args) > 2 else -1)
        order = torch.arange(indices.shape[dim], device="cpu").expand(indices.movedim(dim, -1).shape)
        setattr(indices, ATTRIBUTE, Value(order.movedim(-1, dim), "an unknown order"))


def _about_finite(name: Any, args: tuple[Any, ...]) -> bool | None:
    """The answer to `isnan`, `isinf`, `isfinite` or what they are made of, for numbers; None for another question."""
    if name in (_aten.isnan, _aten.isinf, _aten.isposinf, _aten.isneginf):
        return False
    if name not in (_aten.eq, _aten.ne):
        return None
    other = args[1]
    is_limit = isinstance(other, float) and not math.isfinite(other)
    if other is args[0]:
        return bool(name is _aten.eq)
    return bool(name is _aten.ne) if is_limit else None


def _of_unknown(values: Values, name: Any, args: tuple[Any, ...]) -> Value | None:
    source = args[0]
    dim = args[1] if len(args) > 1 else None
    keepdim = bool(args[2]) if len(args) > 2 else False
    shape = list(source.shape)
    if dim is None:
        shape = []
    elif isinstance(dim, int) and shape:
        if keepdim:
            shape[dim] = 1
        else:
            del shape[dim]
    else:
        return None
    if name is torch.ops.aten.argmax:
        if dim is None or not source.dim():
            return None
        chosen = _spread(values, (*shape, 1), -1, source.shape[dim]).reshape(shape)
        return Value(chosen, ROUTED)
    is_all = _TRUTHS[name]
    words = "unknown values are all true" if is_all else "no unknown value is true"
    return Value(torch.full(shape, is_all, device="cpu"), words)


_aten = torch.ops.aten
# Questions about all values at once, and what is answered where they are unknown.
_TRUTHS = {_aten.any: False, _aten.all: True, _aten._is_any_true: False, _aten._is_all_true: True}
_EMPTY = frozenset({_aten.empty, _aten.empty_strided})
_UNFILLED = frozenset({_aten.empty_like, _aten.new_empty, _aten.new_empty_strided})
_ASSUMED: dict[Any, Callable[[Values, Any, tuple[Any, ...], dict[str, Any]], None]] = {
    _aten.topk: _assume_topk,
    _aten.sort: _assume_sorted,
}


@contextlib.contextmanager
def own_chance() -> Iterator[None]:
    """Draw from a fixed state and put the RNG states of the process back: a plan must not change a training. Python's
    own too, because a program that decides by it must do the same in every trace."""
    kept, kept_python = torch.get_rng_state(), random.getstate()
    torch.default_generator.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(kept)
        random.setstate(kept_python)

"""Operators whose result is shaped by values (nonzero, unique, indexing by a mask), and copies off the meta device.

Owns those operators. `values` owns what is known, and what is assumed where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jackline.memory.predict.values import (
    ATTRIBUTE,
    EVERYTHING,
    MOST_WHOLE,
    Run,
    UnknownValue,
    Value,
    Values,
    keep,
    keep_value,
    known_of,
    most,
)


def run_with_values(values: Values, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`run(func, args, kwargs)` on the meta device, shaped by the values that are known."""
    rule = _RULES.get(func.overloadpacket)
    if rule is not None:
        found = rule(values, func, args, kwargs)
        if found is not NotImplemented:
            return found
    return values.run(run, func, args, kwargs)


def _shaped_by_values(values: Values, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nonzero, unique, bincount, repeat_interleave: from the values, or NotImplemented where they are unknown."""
    if not _has_meta((args, kwargs)):
        return NotImplemented
    assumed: dict[str, None] = {}
    try:
        known_args, known_kwargs = known_of(args, assumed), known_of(kwargs, assumed)
    except UnknownValue:
        return _largest_shape(values, func, args)
    result = func(*known_args, **known_kwargs)
    for one in assumed:
        values.note(one)
    because = next(iter(assumed), "")
    if isinstance(result, tuple | list):
        return tuple(_on_meta(one, because) for one in result)
    return _on_meta(result, because)


def _largest_shape(values: Values, func: Any, args: tuple[Any, ...]) -> Any:
    source = args[0]
    name = func.overloadpacket
    values.note(EVERYTHING)
    if name is torch.ops.aten.nonzero:
        everywhere = torch.ones(source.shape, dtype=torch.bool, device="cpu")
        if source.numel() <= MOST_WHOLE:
            return _on_meta(everywhere.nonzero(), EVERYTHING)
        return torch.empty((source.numel(), source.dim()), dtype=torch.int64, device="meta")
    flat = torch.empty(source.numel(), dtype=source.dtype, device="meta")
    if name in (torch.ops.aten._unique2, torch.ops.aten.unique_consecutive):
        places = torch.empty(source.shape, dtype=torch.int64, device="meta")
        return flat, places, torch.empty(source.numel(), dtype=torch.int64, device="meta")
    return NotImplemented


def _masked_select(values: Values, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, mask = args[:2]
    if not (source.is_meta or mask.is_meta):
        return NotImplemented
    shape = torch.broadcast_shapes(source.shape, mask.shape)  # type: ignore[no-untyped-call]
    result = torch.empty(_num_selected(values, mask, shape), dtype=source.dtype, device="meta")
    keep(result, values.computed(func, args, kwargs), func, ())
    return result


def _num_selected(values: Values, mask: Tensor, shape: Any) -> int:
    known = values.value_of(mask)
    if known is None:
        values.note(EVERYTHING)
        return int(torch.Size(shape).numel())
    return int(known.expand(shape).count_nonzero())


def _index(values: Values, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing by a mask: the mask's places take its place, so that the shape of the result is known."""
    source, indices = args[:2]
    if not source.is_meta or not any(_is_mask(index) for index in indices):
        return NotImplemented
    result = torch.ops.aten.index.Tensor(source, _places(values, indices))
    keep(result, values.computed(func, args, kwargs), func, ())
    return result


def _places(values: Values, indices: Any) -> list[Tensor | None]:
    places: list[Tensor | None] = []
    for index in indices:
        if not _is_mask(index):
            places.append(index.to("meta") if index is not None and not index.is_meta else index)
            continue
        count = _num_selected(values, index, index.shape)
        places += [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim())]
    return places


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _index_put(values: Values, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if not source.is_meta:
        return NotImplemented
    is_in_place = func.overloadpacket is torch.ops.aten.index_put_
    result = source if is_in_place else torch.empty_like(source)
    value = values.computed(func, args, kwargs)
    keep(result, value, func, (result,))
    return result


def _copied(values: Values, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """To the meta device and back: a copy to the CPU has the value, or zeros."""
    source, device = args[0], kwargs.get("device")
    if device is None or source.is_meta == (device.type == "meta"):
        return NotImplemented
    if not source.is_meta:
        result = func(*args, **kwargs)
        if result.is_meta:
            keep_value(result, source.to(result.dtype))
        return result
    known = values.value_of(source)
    known = values.assume(source) if known is None else known
    return known.to(kwargs.get("dtype") or source.dtype, copy=True)


def _copied_into(values: Values, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    if target.is_meta or not source.is_meta:
        return NotImplemented
    known = values.value_of(source)
    return target.copy_(known if known is not None else values.assume(source))


def _on_meta(value: Tensor, assumed: str = "") -> Tensor:
    result = torch.empty(value.shape, dtype=value.dtype, device="meta")
    if value.numel() <= most(value):
        setattr(result, ATTRIBUTE, Value(value, assumed))
    return result


def _has_meta(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, dict):
        return any(_has_meta(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_has_meta(item) for item in value)


_aten = torch.ops.aten
_RULES: dict[Any, Callable[[Values, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.nonzero: _shaped_by_values,
    _aten._unique2: _shaped_by_values,
    _aten.unique_dim: _shaped_by_values,
    _aten.unique_consecutive: _shaped_by_values,
    _aten.bincount: _shaped_by_values,
    _aten.repeat_interleave: _shaped_by_values,
    _aten.masked_select: _masked_select,
    _aten.index: _index,
    _aten.index_put: _index_put,
    _aten.index_put_: _index_put,
    _aten._to_copy: _copied,
    _aten.copy_: _copied_into,
}

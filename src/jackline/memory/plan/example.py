"""An example batch in any size: from the batch that a person's own function returns.

Owns which of its parts grow with the number of samples. Tensors whose first dimension is the batch's size do, and
lists with one entry for each sample; all else (the edges of a graph, a mask for attention, a table) keeps its size,
and the plan names it. Values are kept where they are known, because a model may ask for them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from jackline.memory.predict.values import forget_value, keep_value, known_value


def batch_size(batch: Any) -> int:
    """The samples of a batch: the first dimension of its first tensor, or the length of its first list of samples. 0
    where there is neither."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 0
    parts = list(_parts(batch))
    for part in parts:
        if isinstance(part, Tensor) and part.dim():
            return int(part.shape[0])
    for part in parts:
        if isinstance(part, list) and part and _has_tensor(part):
            return len(part)
        if (found := batch_size(part)) > 0:
            return found
    return 0


def resized(value: Any, before: int, count: int) -> Any:
    """The same batch with `count` samples instead of `before`: without memory on the meta device, elsewhere with the
    samples repeated."""
    if isinstance(value, Tensor):
        return _rows(value, count if value.dim() and value.shape[0] == before else None)
    if isinstance(value, list) and len(value) == before and _is_of_samples(value, before):
        return [_same(value[number % before]) for number in range(count)]
    return _rebuilt(value, lambda part: resized(part, before, count))


def kept_sizes(batch: Any, before: int) -> tuple[str, ...]:
    """The tensors that do not grow with the batch: '(2, 10556)'."""
    found = []
    for part in _parts(batch):
        if isinstance(part, Tensor):
            if part.dim() and part.shape[0] != before and part.numel() > 1:
                found.append(str(tuple(part.shape)))
        elif not (isinstance(part, list) and len(part) == before):
            found += kept_sizes(part, before)
    return tuple(found)


def _parts(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, tuple | list):
        yield from batch
    elif not isinstance(batch, Tensor | type) and hasattr(batch, "__dict__"):
        yield from vars(batch).values()


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or any(
        _has_tensor(part) for part in _parts(value) if isinstance(part, Tensor | Mapping | tuple | list)
    )


def _is_of_samples(value: list[Any], before: int) -> bool:
    """One entry for each sample, and not two tensors that both hold two samples."""
    whole = [part for part in value if isinstance(part, Tensor) and part.dim() and part.shape[0] == before]
    return not whole and _has_tensor(value)


def _same(value: Any) -> Any:
    return _rows(value, None) if isinstance(value, Tensor) else _rebuilt(value, _same)


def _rebuilt(value: Any, change: Any) -> Any:
    if isinstance(value, Mapping):
        made = {key: change(item) for key, item in value.items()}
        try:
            return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
        except TypeError:
            return made
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(change(item) for item in value)
    if isinstance(value, tuple | list):
        return type(value)(change(item) for item in value)
    if not dataclasses.is_dataclass(value) and not (hasattr(value, "__dict__") and _has_tensor(list(_parts(value)))):
        return value
    if isinstance(value, type) or callable(value):
        return value
    made_object = copy.copy(value)
    for key, item in vars(value).items():
        object.__setattr__(made_object, key, change(item))
    return made_object


def _rows(value: Tensor, count: int | None) -> Tensor:
    """`count` rows of it, or all as they are."""
    shape = tuple(value.shape) if count is None else (count, *value.shape[1:])
    if torch.get_default_device().type != "meta":
        if value.is_meta:
            return torch.zeros(shape, dtype=value.dtype)
        rows = value if count is None else value[_chosen(value, count)]
        return rows.to(torch.get_default_device())
    made = torch.empty(shape, dtype=value.dtype)
    known = known_value(value)
    # Zeros are what people write where the values do not matter: no padding shall be seen in them.
    if known is None or (known.dim() and not known.is_floating_point() and not known.any()):
        forget_value(made)
    else:
        keep_value(made, known if count is None else known[_chosen(known, count)])
    return made


def _chosen(value: Tensor, count: int) -> Tensor:
    with torch.device(value.device):
        return torch.arange(count) % max(1, value.shape[0])

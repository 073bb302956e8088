"""Samples of a batch, whatever it is made of: how many there are, some of them, and who minds which are together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from jackline.errors import UsageError

_CONTRASTIVE = ("contrastive", "infonce", "ntxent", "cliploss", "tripletmargin")


def batch_dependent(model: nn.Module) -> set[str]:
    """Names of modules whose result for one sample depends on the other samples of the batch."""
    found = set()
    for module in model.modules():
        name = type(module).__name__
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        if is_norm or any(word in name.lower() for word in _CONTRASTIVE):
            found.add(name)
    return found


def count_samples(batch: Any) -> int:
    """The common first dimension of all tensors in the batch."""
    sizes = {tensor.shape[0] for tensor in list_tensors(batch) if tensor.dim()}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) if sizes else "none"
        raise UsageError(
            f"the tensors of a batch must have one first dimension in common, found {found}",
            hint="put what is not per sample inside fn, not into the batch",
        )
    size: int = sizes.pop()
    if size == 0:
        raise UsageError("the batch has no samples")
    return size


def list_tensors(value: Any) -> Iterator[Tensor]:
    """Also those inside mappings, tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from list_tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from list_tensors(item)


def take_slice(value: Any, begin: int, end: int) -> Any:
    """Samples `begin` to `end`; values without samples are passed unchanged."""
    if isinstance(value, Tensor):
        return value[begin:end] if value.dim() else value
    if isinstance(value, Mapping):
        return {key: take_slice(item, begin, end) for key, item in value.items()}
    if isinstance(value, tuple | list):
        parts = [take_slice(item, begin, end) for item in value]
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts) if is_named else type(value)(parts)
    return value

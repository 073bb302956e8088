"""The Python calls by which a program reads a tensor: `item`, `bool`, `tolist`, indexing by a number.

Owns those calls for tensors of the meta device, where PyTorch raises. `values` owns the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from jackline.memory.predict.values import Values, keep_value

_READS: dict[str, Callable[[Tensor], Any]] = {
    "item": Tensor.item,
    "__bool__": Tensor.__bool__,
    "__int__": Tensor.__int__,
    "__float__": Tensor.__float__,
    "__index__": Tensor.__index__,
    "__complex__": Tensor.__complex__,
    "is_nonzero": Tensor.is_nonzero,
    "tolist": Tensor.tolist,
    "numpy": Tensor.numpy,
}
_MAKES = frozenset({"tensor", "as_tensor", "new_tensor", "asarray"})
_COMPARES = frozenset({"equal", "allclose"})
_INDEXES = frozenset({"__getitem__", "__setitem__"})


class Questions(TorchFunctionMode):
    """Answers from known values; unknown ones are assumed and noted."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return _READS[name](self._read(args[0]))
        if name in _MAKES:
            return self._make(func, args, kwargs)
        if name in _COMPARES and any(isinstance(one, Tensor) and one.is_meta for one in args[:2]):
            return self._compare(func, args, kwargs)
        if name == "split_with_sizes" or (name == "split" and len(args) > 1 and isinstance(args[1], list)):
            args = (args[0], self._shared(args[0], *args[1:3], **kwargs), *args[2:])
        if name in _INDEXES and args[0].is_meta:
            args = (args[0], self._numbered(args[1], is_index=True), *args[2:])
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError, NotImplementedError):
            # A number was wanted and a tensor given: `torch.arange(lengths.max())`.
            numbered = self._numbered((args, kwargs), is_index=False)
            if not _is_changed(numbered, (args, kwargs)):
                raise
            return func(*numbered[0], **numbered[1])

    def _read(self, tensor: Tensor) -> Tensor:
        known = self._values.value_of(tensor)
        return self._values.assume(tensor) if known is None else known

    def _shared(self, value: Tensor, sizes: Any, dim: int = 0) -> Any:
        """Sizes of parts that were read of an unknown tensor are all zero: then the parts are alike."""
        count, total = len(sizes), value.shape[dim] if value.dim() else 0
        if not value.is_meta or not count or not total or any(sizes):
            return sizes
        self._values.note("parts of unknown sizes are alike")
        return [total // count + (number < total % count) for number in range(count)]

    def _make(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = self._numbered(args, is_index=False) if args and isinstance(args[0], list | tuple) else args
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_meta:
            data = kwargs.get("data", args[-1] if args else None)
            if not isinstance(data, Tensor):
                keep_value(result, torch.tensor(data, dtype=result.dtype, device="cpu"))
        return result

    def _compare(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if args[0].shape != args[1].shape:
            return False
        known = [self._values.value_of(one) for one in args[:2]]
        if any(one is None for one in known):
            return True
        return bool(func(*known, *args[2:], **kwargs))

    def _numbered(self, value: Any, *, is_index: bool) -> Any:
        """The same with a number in place of every meta tensor that holds one whole number."""
        if isinstance(value, Tensor):
            is_number = value.is_meta and value.dim() == 0 and value.dtype != torch.bool
            if is_number and not (value.is_floating_point() and is_index):
                return self._read(value).item()
            return value
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._numbered(item, is_index=is_index) for item in value)
        if isinstance(value, slice):
            return slice(*(self._numbered(part, is_index=True) for part in (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {key: self._numbered(item, is_index=is_index) for key, item in value.items()}
        return value


def _is_changed(new: Any, old: Any) -> bool:
    if isinstance(old, Tensor):
        return new is not old
    if isinstance(old, list | tuple):
        return any(_is_changed(one, other) for one, other in zip(new, old, strict=True))
    if isinstance(old, dict):
        return any(_is_changed(new[key], old[key]) for key in old)
    return False

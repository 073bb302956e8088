"""Which tensors live when: every storage made and freed on one device, in order, with what it is for.

Owns the recording and its result. Works on the meta device (nothing is computed) and on real tensors alike; what is
run while recording is `predict`'s and `rehearse`'s. Memory that kernels take for themselves is added by rule.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jackline.memory.meta_shortcuts import run_meta

# 'measured' stands alone, where a real run was measured as a whole and not traced.
Part = Literal[
    "weights",
    "weight_copies",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "temporaries",
    "workspace",
    "measured",
]


@dataclass(frozen=True)
class Allocation:
    """One storage. `last_dim` is that of the tensor it was made for: logits are known by it."""

    num_bytes: int
    last_dim: int
    part: Part
    phase: str


@dataclass(frozen=True)
class Trace:
    """`events` are indices into `allocations`: i when the i-th is made, ~i (that is -i - 1) when it is freed."""

    allocations: tuple[Allocation, ...]
    events: tuple[int, ...]
    unknowns: tuple[str, ...] = ()  # operators whose kernels take memory nobody can tell beforehand

    def with_sizes(self, sizes: Iterable[int]) -> Trace:
        pairs = zip(self.allocations, sizes, strict=True)
        return replace(self, allocations=tuple(replace(made, num_bytes=size) for made, size in pairs))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records while it is entered. `part` and `phase` label what is made from then on."""

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part: Part = "temporaries"
        self.phase = "start"
        self._device_type = device_type
        self._live: dict[int, tuple[int, Any]] = {}
        self._events: list[int] = []
        self._sizes: list[int] = []
        self._last_dims: list[int] = []
        self._parts: list[Part] = []
        self._phases: list[str] = []
        self._unknowns: dict[str, None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks this; True would import its compiler at the first operator, a second of CPU for nothing."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = run_meta if self._device_type == "meta" else _run
        result = run(func, args, kwargs or {})
        for tensor in _tensors(result):
            self.add(tensor)
        name = func.overloadpacket.__name__
        hidden = _HIDDEN.get(name)
        if hidden is not None:
            self._pass_through(hidden(*args))
        elif name.startswith("convolution") or func.namespace not in _KNOWN_NAMESPACES:
            self._unknowns[f"{func.namespace}::{name}"] = None
        return result

    def add(self, tensor: Tensor, part: Part | None = None) -> None:
        """Note a tensor's storage, and label it when `part` is given, also if it was known before."""
        if tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is None:
            num_bytes = storage.nbytes()
            if num_bytes == 0:
                return
            index = self._note(num_bytes, tensor.shape[-1] if tensor.dim() else 0, part or self.part)
            self._live[key] = (index, weakref.ref(storage, partial(self._dropped, key, index)))
        elif part is not None:
            self._parts[known[0]] = part

    def _note(self, num_bytes: int, last_dim: int, part: Part) -> int:
        index = len(self._sizes)
        self._sizes.append(num_bytes)
        self._last_dims.append(last_dim)
        self._parts.append(part)
        self._phases.append(self.phase)
        self._events.append(index)
        return index

    def _dropped(self, key: int, index: int, _: Any) -> None:
        if self._live.get(key, (-1,))[0] == index:
            del self._live[key]
        self._events.append(~index)

    def _pass_through(self, sizes: Iterable[int]) -> None:
        """Memory a kernel takes and gives back before it is done. Noted also when it is 0, so that traces of two
        batch sizes have the same events."""
        indices = [self._note(size, 0, "temporaries") for size in sizes]
        self._events += [~index for index in reversed(indices)]

    def reserve(self, sizes: Iterable[int]) -> None:
        """Memory that is taken once and kept, such as cuBLAS's workspaces."""
        for size in sizes:
            self._note(size, 0, "workspace")

    def survivors(self, since: int) -> list[int]:
        """Indices of what was made since event number `since` and still lives."""
        return [index for index, _ in self._live.values() if index >= since]

    def mark(self) -> int:
        return len(self._sizes)

    def label(self, indices: Iterable[int], part: Part) -> None:
        for index in indices:
            if self._parts[index] == "temporaries":
                self._parts[index] = part

    def finish(self, class_sizes: Iterable[int] = ()) -> Trace:
        """The result. What is as wide as a loss has classes is called logits, whenever it was made."""
        classes = {size for size in class_sizes if size > 1}
        allocations = []
        rows = zip(self._sizes, self._last_dims, self._parts, self._phases, strict=True)
        for num_bytes, last_dim, part, phase in rows:
            is_logits = last_dim in classes and part in ("activations", "temporaries")
            allocations.append(Allocation(num_bytes, last_dim, "logits" if is_logits else part, phase))
        return Trace(tuple(allocations), tuple(self._events), tuple(self._unknowns))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


# Kernels that take memory for themselves.

_KNOWN_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "_c10d_functional"})
_SORT_FROM = 3072
_ROWS_A_PART = 10


def _embedding_backward(grad: Tensor, indices: Tensor, num_weights: int, *_: Any) -> list[int]:
    """From 3072 indices on they are sorted first, and rows of equal index are summed in parts of ten."""
    count, width = indices.numel(), grad.shape[-1]
    if count <= _SORT_FROM:
        return [0, 0, 0]
    # As many different rows as evenly drawn indices would meet: real text meets fewer.
    distinct = num_weights * -math.expm1(-count / num_weights)
    num_parts = int(distinct + count / _ROWS_A_PART)
    return [8 * count, 8 * count, 4 * num_parts * (-(-width // 32) * 32)]


_HIDDEN: dict[str, Callable[..., list[int]]] = {"embedding_dense_backward": _embedding_backward}

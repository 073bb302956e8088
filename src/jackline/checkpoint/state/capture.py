"""Turns live objects into the contents of a checkpoint: a list of tensors and a tree of plain values.

Copies no tensor: it lists which ones there are, under which names, and which of them may be copied later (they change
only where the loop declares it). Everything that is not a tensor is read immediately.
Owns the names in the files. Does not own the copying (stage.py) or the restore (restore.py).
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jackline.checkpoint.format.manifest import rank_file
from jackline.checkpoint.format.regions import SHARDED
from jackline.checkpoint.format.tree import KIND, NOT_A_LEAF, CannotSave, encode, encode_bytes
from jackline.checkpoint.shards import is_distributed, is_divided, local_of, parts_of
from jackline.checkpoint.state import rng as random_state
from jackline.checkpoint.state.attributes import Baseline, unwrap
from jackline.checkpoint.state.dtypes import PLAIN_TYPES, STORED_AS_THEMSELVES, dtype_name, require_storable
from jackline.checkpoint.state.frozen import HashTensor
from jackline.checkpoint.state.outside import clean_name, describe_outside

MAX_KEY = 100
OUTSIDE = ".outside"  # ending of the file with the tensors of KEY that its state_dict leaves out
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Source(NamedTuple):
    """One tensor to be stored: in the file of `key`, under `name`. `is_deferred`: it may be copied later."""

    key: str
    name: str
    tensor: Tensor
    is_deferred: bool


@dataclass
class Captured:
    """Everything of one instant. `tree` can be written as JSON. `unsaved`: state that cannot be stored."""

    tree: dict[str, Any]
    sources: list[Source]
    unsaved: tuple[str, ...] = ()


@dataclass
class _Collector:
    """Walks one state. With `hash_frozen`, frozen parameters are not stored but recorded by their hash."""

    defer: Collection[str]
    hash_frozen: HashTensor | None
    baseline: Baseline
    key: str = ""
    sources: list[Source] = field(default_factory=list)
    seen: dict[int, list[tuple[Tensor, dict[str, Any]]]] = field(default_factory=dict)  # by address
    used: dict[str, set[str]] = field(default_factory=dict)  # names in each file
    unsaved: list[str] = field(default_factory=list)

    def leaf(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value, where, is_deferred=self.key in self.defer)
        if isinstance(value, nn.Module):
            return self.module(value, where)
        if isinstance(value, torch.optim.Optimizer) and is_plain_optimizer(value):
            return self.optimizer(value, where)
        found = _encode_object(value)
        if found is not NOT_A_LEAF:
            return found
        if _is_numpy(value):
            return self.numpy(value, where)
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            state = encode(value.state_dict(), where, self.leaf)
            node = {KIND: "stateful", "class": type(value).__name__, "state": state}
            return self._with_outside(node, value, where) if isinstance(value, torch.optim.Optimizer) else node
        return NOT_A_LEAF

    def tensor(self, tensor: Tensor, where: str, *, is_deferred: bool) -> dict[str, Any]:
        """A node that says where the values are. Identical views of the same memory are stored once.

        Runs several hundred times in every save, in the loop's own thread; so it calls neither detach() nor small
        helpers.
        """
        if type(tensor) not in PLAIN_TYPES and is_distributed(tensor):
            return self.distributed(tensor, where, is_deferred=is_deferred)
        require_storable(tensor, where)
        alike = self.seen.setdefault(tensor.data_ptr(), [])
        for other, known in alike:
            if _is_same_view(other, tensor):
                return known
        name = self._name(where)
        node: dict[str, Any] = {KIND: "tensor", "file": self.key, "name": name}
        if tensor.dtype not in STORED_AS_THEMSELVES:
            node["dtype"] = dtype_name(tensor.dtype)
        if not tensor.is_contiguous():
            node["stride"] = list(tensor.stride())
        if not tensor.is_cpu:
            node["device"] = tensor.device.type
        self.sources.append(Source(self.key, name, tensor, is_deferred))
        alike.append((tensor, node))
        return node

    def distributed(self, tensor: Any, where: str, *, is_deferred: bool) -> dict[str, Any]:
        """A tensor of which every rank has a part: each stores its own, in a file of its own, and all know all."""
        local = local_of(tensor).detach()
        if not is_divided(tensor, where):
            return self.tensor(local, where, is_deferred=is_deferred)
        require_storable(local, where)
        parts = parts_of(tensor, where)
        alike = self.seen.setdefault(local.data_ptr(), [])
        for other, known in alike:
            if _is_same_view(other, local):
                return known
        name = self._name(where)
        node: dict[str, Any] = {KIND: SHARDED, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
        node["parts"] = [
            {"file": rank_file(self.key, rank), "name": name, "offsets": region.offsets, "shape": region.shape}
            for rank, region in parts.items()
        ]
        if not local.is_cpu:
            node["device"] = local.device.type
        rank = torch.distributed.get_rank()
        if rank in parts:
            self.sources.append(Source(rank_file(self.key, rank), name, local, is_deferred))
        alike.append((local, node))
        return node

    def _name(self, where: str) -> str:
        """The name in the file of this key."""
        name = where[len(self.key) + 1 :] or "value"
        names = self.used.setdefault(self.key, set())
        if name in names:
            name = _free_name(name, names)
        names.add(name)
        return name

    def module(self, module: nn.Module, where: str) -> dict[str, Any]:
        """Parameters may be copied later: only the optimizer changes them. The forward pass changes buffers."""
        tensors: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        left_out: dict[str, Any] = {}
        for name, value in unwrap(module).state_dict(keep_vars=True).items():
            clean = clean_name(name)
            if not isinstance(value, Tensor):
                extra[clean] = encode(value, f"{where}.{clean}", self.leaf)
            elif self._is_left_out(value):
                assert self.hash_frozen is not None
                left_out[clean] = {"hash": self.hash_frozen(value.detach()), "shape": list(value.shape)}
            else:
                is_deferred = isinstance(value, nn.Parameter) or self.key in self.defer
                tensors[clean] = self.tensor(value, f"{where}.{clean}", is_deferred=is_deferred)
        node = {KIND: "module", "class": type(unwrap(module)).__name__, "tensors": tensors}
        node = self._with_outside(node, unwrap(module), where)
        return {**node, **{word: part for word, part in (("extra", extra), ("left_out", left_out)) if part}}

    def optimizer(self, optimizer: torch.optim.Optimizer, where: str) -> dict[str, Any]:
        index: dict[int, int] = {}
        groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                index.setdefault(id(parameter), len(index))
            settings = {word: value for word, value in group.items() if word != "params"}
            encoded = encode(settings, f"{where}.groups.{len(groups)}", self.leaf)
            groups.append({"settings": encoded, "params": [index[id(parameter)] for parameter in group["params"]]})
        states = {}
        for parameter, values in optimizer.state.items():
            number = index.get(id(parameter))
            if number is None:
                raise CannotSave(f"{where} holds state for a parameter that is in none of its groups")
            states[str(number)] = self._optimizer_state(values, f"{where}.state.{number}")
        shapes = [list(p.shape) for group in optimizer.param_groups for p in group["params"]]
        node = {
            KIND: "optimizer",
            "class": type(optimizer).__name__,
            "groups": groups,
            "state": states,
            "shapes": shapes,
        }
        return self._with_outside(node, optimizer, where)

    def _is_left_out(self, value: Tensor) -> bool:
        is_frozen = isinstance(value, nn.Parameter) and not value.requires_grad
        return self.hash_frozen is not None and is_frozen and not is_distributed(value)

    def numpy(self, value: Any, where: str) -> Any:
        import numpy

        if isinstance(value, numpy.random.Generator):
            state = encode(random_state.pack_numpy(dict(value.bit_generator.state)), where, self.leaf)
            return {KIND: "numpy generator", "state": state}
        if isinstance(value, numpy.random.RandomState):
            state = encode(random_state.pack_numpy(value.get_state(legacy=False)), where, self.leaf)
            return {KIND: "numpy random state", "state": state}
        is_odd = hasattr(value, "mask") or value.dtype.kind not in "biufc"
        if is_odd or value.dtype.itemsize > 16 or str(value.dtype) == "float128":
            raise CannotSave(f"{where} cannot be saved: a numpy {type(value).__name__} of {value.dtype}")
        plain = numpy.array(value, dtype=value.dtype.newbyteorder("="), order="C")  # a copy: it may change any time
        if isinstance(value, numpy.ndarray):
            node = self.tensor(torch.from_numpy(plain), where, is_deferred=False)
            return {KIND: "array", "tensor": node, "dtype": str(plain.dtype)}
        return {KIND: "numpy scalar", "value": encode_bytes(plain.tobytes()), "dtype": str(plain.dtype)}

    def _optimizer_state(self, values: Any, where: str) -> Any:
        if not isinstance(values, dict):
            return encode(values, where, self.leaf)
        return {
            word: self.tensor(value, f"{where}.{word}", is_deferred=True)
            if isinstance(value, Tensor)
            else encode(value, f"{where}.{word}", self.leaf)
            for word, value in values.items()
        }

    # -- outside state_dict (outside.py) -----------------------------------------------------------------------------

    def outside_tensor(self, tensor: Tensor, where: str) -> dict[str, Any]:
        with self._in_other_file(where) as at:
            return self.tensor(tensor, at, is_deferred=False)

    def outside_value(self, value: Any, where: str) -> Any:
        with self._in_other_file(where) as at:
            return encode(value, at, self.leaf)

    def _with_outside(
        self, node: dict[str, Any], root: nn.Module | torch.optim.Optimizer, where: str
    ) -> dict[str, Any]:
        outside = describe_outside(root, where, self)
        # An empty one of a module says that nothing is frozen and all is in train mode: the program may differ.
        return {**node, "outside": outside} if outside or isinstance(root, nn.Module) else node

    @contextlib.contextmanager
    def _in_other_file(self, where: str) -> Iterator[str]:
        """Tensors inside this block go into the file of what is outside; gives `where` as seen from there."""
        before = self.key
        if not before.endswith(OUTSIDE):
            self.key += OUTSIDE
        try:
            yield self.key + where[len(before) :]
        finally:
            self.key = before


def _free_name(taken: str, names: set[str]) -> str:
    number = 2
    while f"{taken}~{number}" in names:
        number += 1
    return f"{taken}~{number}"


def capture(
    state: Mapping[str, Any],
    *,
    defer: Collection[str] = (),
    hash_frozen: HashTensor | None = None,
    baseline: Baseline | None = None,
) -> Captured:
    """Read the whole state. `defer` names keys whose loose tensors change only at declared points (EMA, masks).

    `baseline`: attributes as the program made them. Without it none counts as changed.
    """
    collector = _Collector(defer, hash_frozen, baseline or Baseline())
    tree = {}
    for key, value in state.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key) or ".." in key or len(key) > MAX_KEY:
            raise CannotSave(f"{key!r} cannot name a part of the state", hint="use letters, digits, '_', '-' and '.'")
        if key.endswith(OUTSIDE):
            raise CannotSave(f"{key!r} cannot name a part of the state", hint=f"names ending in {OUTSIDE} are taken")
        collector.key = key
        tree[key] = encode(value, key, collector.leaf)
    return Captured(tree, collector.sources, tuple(collector.unsaved))


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors at one address have the same values. A pending conjugation makes the values different."""
    if one is other:
        return one.numel() > 0
    is_alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    is_lazy = (one.is_conj(), one.is_neg()) != (other.is_conj(), other.is_neg())
    return is_alike and not is_lazy and one.numel() > 0


def is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is where torch puts it. If it has its own state_dict, that is called instead."""
    kind, plain = type(optimizer), torch.optim.Optimizer
    return kind.state_dict is plain.state_dict and kind.load_state_dict is plain.load_state_dict


def _encode_object(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        state = encode_bytes(random_state.read_generator(value))
        return {KIND: "torch generator", "device": value.device.type, "state": state}
    if isinstance(value, random.Random):
        packed = random_state.pack_python(value.getstate())
        return {KIND: "python random", "state": encode(packed, "", lambda *_: NOT_A_LEAF)}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "name": dtype_name(value)}
    if isinstance(value, torch.device):
        return {KIND: "device", "name": str(value)}
    if isinstance(value, torch.Size):
        return {KIND: "tuple", "items": list(value)}
    return NOT_A_LEAF


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(value, numpy.ndarray | numpy.generic | numpy.random.Generator | numpy.random.RandomState)

"""Attributes of modules and optimizers that are not in their `state_dict`: which ones changed since they were built.

A counter, `dropout.p`, an unregistered tensor, a non-persistent buffer, an optimizer inside an optimizer: all belong
to a training. The program that resumes builds all of them again, so only those that training has changed are state.
Owns the walk over attributes and the comparison with the program's own values. outside.py stores and restores them.
"""

from __future__ import annotations

import enum
import functools
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jackline.checkpoint.state.frozen import FrozenHashes, hash_tensor

MAX_TENSOR_BYTES = 16 << 20  # of an attribute: larger ones are mostly caches of activations
_HASHED_BYTES = 64 << 10  # up to here contents are compared, above it torch's version counter
MAX_LEAVES = 5_000  # values inside one container
MAX_DEPTH = 3  # objects inside objects
_SCALARS = frozenset((type(None), bool, int, float, str, complex, bytes))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_CODE = (
    type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial,
    weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType, types.CodeType, property,
)  # fmt: skip
# Objects of these packages have no attributes that a person counts in.
_FOREIGN = frozenset(
    ("torch", "numpy", "threading", "logging", "multiprocessing", "io", "ctypes", "re", "queue", "concurrent",
     "asyncio", "collections", "weakref", "_thread", "_io", "itertools", "jackline")
)  # fmt: skip
_TORCHS_OWN = frozenset(nn.Module().__dict__) | {"_compiled_call_impl"}
_TORCHS_PREFIXES = ("_optimizer_", "__composable_api_state_key", "_fsdp_", "_is_fsdp_")  # the last ones: fully_shard
_OPTIMIZERS_OWN = frozenset(("defaults", "state", "param_groups", "_zero_grad_profile_name"))


Root = nn.Module | torch.optim.Optimizer
Parts = Mapping[str, nn.Module]


class Found(NamedTuple):
    """One attribute: `owner` is the name of the submodule ('' for the object itself), `path` leads on from there."""

    owner: str
    path: str
    value: Any


def named_parts(module: nn.Module) -> dict[str, nn.Module]:
    """The submodules by name, without the wrappers of torch.compile."""
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        if isinstance(part.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            continue
        found[".".join(word for word in name.split(".") if word != "_orig_mod")] = part
    return found


def find_hidden_buffers(parts: Parts) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """Buffers that `state_dict` leaves out (persistent=False): the owner, the name there, the tensor."""
    return {
        f"{owner}.{name}" if owner else name: (part, name, buffer)
        for owner, part in parts.items()
        if part._non_persistent_buffers_set
        for name, buffer in part._buffers.items()
        if buffer is not None and name in part._non_persistent_buffers_set
    }


def find_roots(state: Mapping[str, Any]) -> list[Root]:
    """The modules and optimizers in a state, also inside lists and dicts; modules without compile's wrapper."""
    found: list[Root] = []
    stack = list(state.values())
    while stack:
        value = stack.pop()
        if isinstance(value, torch.optim.Optimizer):
            found.append(value)
        elif isinstance(value, nn.Module):
            found.append(unwrap(value))
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
    return found


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside torch.compile and DistributedDataParallel: a checkpoint does not depend on these wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


class Baseline:
    """The attributes as the program made them. Noted before anything is restored into the objects."""

    def __init__(self) -> None:
        self.hashes = FrozenHashes()  # of hidden buffers that did not change
        self._roots: set[int] = set()  # objects that are saved themselves
        self._known: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Any]] = weakref.WeakKeyDictionary()

    def note_all(self, roots: list[Root]) -> None:
        """The objects that are saved themselves: an attribute that refers to one of them is not saved again."""
        self._roots.update(map(id, roots))
        for root in roots:
            self.note(root)

    def note(self, root: Root) -> None:
        """Remember the current attributes, the first time this object is seen."""
        if root not in self._known:
            self._known[root] = dict(_read(root, self._roots))

    def changed(self, root: Root, parts: Parts | None = None) -> list[Found]:
        """The attributes that differ from the program's own, and everything that keeps state of its own."""
        self.note(root)
        known = self._known[root]
        covered: set[int] | None = None
        found = []
        for one in walk(root, self._roots, parts):
            # Nearly all attributes are numbers and words: 1 us each instead of 5, at every save.
            kind, value = type(one.value), one.value
            before = known.get((one.owner, one.path))
            if kind in _SCALARS and value == value:
                if before != (kind, value):
                    found.append(one)
                continue
            covered = _covered(root, parts) if covered is None else covered
            if _has_own_state(value) or before is None or before != summarise(value, covered, [MAX_LEAVES]):
                found.append(one)
        return found

    def is_changed_buffer(self, root: nn.Module, name: str, buffer: Tensor) -> bool:
        self.note(root)
        return bool(self._known[root].get(("", f"buffer {name}")) != _summarise_tensor(buffer))


def walk(root: Root, leave_out: Collection[int] = (), parts: Parts | None = None) -> Iterator[Found]:
    """Every attribute outside torch's own, once; objects of the user's own classes are opened.

    `leave_out`: identities of objects that are saved themselves. `parts`: `named_parts(root)`, where it is known.
    """
    seen = {id(root), *leave_out}
    if parts is None and isinstance(root, nn.Module):
        parts = named_parts(root)
    owners: Mapping[str, Any] = {"": root} if parts is None else parts
    seen.update(map(id, owners.values()))
    own = _OPTIMIZERS_OWN if parts is None else _TORCHS_OWN
    for owner, part in owners.items():
        for name, value in list(part.__dict__.items()):
            if name in own or name.startswith(_TORCHS_PREFIXES):
                continue
            if type(value) in _SCALARS:
                yield Found(owner, name, value)
            else:
                yield from open_value(owner, name, value, seen, MAX_DEPTH)


def is_live(value: Any) -> bool:
    """Whether this is an object that restores itself in place, instead of a value that replaces another."""
    return isinstance(value, nn.Module | torch.optim.Optimizer | torch.Generator) or _has_own_state(value)


def open_value(owner: str, path: str, value: Any, seen: set[int], depth: int) -> Iterator[Found]:
    """The value itself, or the attributes of an object of the user's own. `seen`: identities to leave out."""
    if type(value) in _SCALARS:
        yield Found(owner, path, value)
        return
    if isinstance(value, _CODE) or id(value) in seen:
        return
    if not isinstance(value, _CONTAINERS):
        seen.add(id(value))
    if depth and _is_own_object(value):
        for name, inner in list(value.__dict__.items()):
            yield from open_value(owner, f"{path}.{name}", inner, seen, depth - 1)
        return
    if not _is_foreign(value):
        yield Found(owner, path, value)


def _is_own_object(value: Any) -> bool:
    """An instance of a class of the user's, which keeps its state in attributes."""
    if isinstance(value, nn.Module | Tensor | torch.optim.Optimizer | enum.Enum | BaseException):
        return False
    if isinstance(value, (*_CONTAINERS, *_CODE)) or _is_generator(value):
        return False
    if _has_own_state(value) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return type(value).__module__.partition(".")[0] not in _FOREIGN


def _is_foreign(value: Any) -> bool:
    """A lock, a handle or the like: nothing that training changes, and nothing that could be saved."""
    if isinstance(value, Tensor | nn.Module | torch.optim.Optimizer) or _is_generator(value):
        return False
    if isinstance(value, _CONTAINERS):
        return False
    if _has_own_state(value) or _is_array(value) or callable(value):
        return callable(value) and not _has_own_state(value)
    return type(value).__module__.partition(".")[0] in _FOREIGN - {"itertools"}


def _has_own_state(value: Any) -> bool:
    """Anything with a state of its own, except modules: those are compared, because they may be large."""
    if isinstance(value, nn.Module | type):
        return False
    if type(value) in _SCALARS:
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _read(root: Root, leave_out: Collection[int]) -> Iterator[tuple[tuple[str, str], Any]]:
    covered = _covered(root)
    for found in walk(root, leave_out):
        yield (found.owner, found.path), summarise(found.value, covered, [MAX_LEAVES])
    if isinstance(root, nn.Module):
        for name, (_, _, buffer) in find_hidden_buffers(named_parts(root)).items():
            yield ("", f"buffer {name}"), _summarise_tensor(buffer)


def _covered(root: Root, parts: Parts | None = None) -> set[int]:
    """The identities of what is saved anyway: parameters, buffers, the state of optimizers."""
    if isinstance(root, nn.Module):
        found = set[int]()
        for part in (named_parts(root) if parts is None else parts).values():
            found.update(map(id, part._parameters.values()), map(id, part._buffers.values()))
        return found - {id(None)}
    found = {id(root.state), id(root.param_groups)}
    for group in root.param_groups:
        found.update((id(group), *map(id, group["params"])))
    for inner in vars(root).values():
        if isinstance(inner, torch.optim.Optimizer):
            found.update((id(inner.state), id(inner.param_groups)))
    return found


def summarise(value: Any, covered: set[int], left: list[int]) -> Any:
    """Something that compares equal as long as the value is the same. `left` counts down the values looked at."""
    kind = type(value)
    if kind in _SCALARS:
        return kind, value if value == value else "nan"
    if id(value) in covered:
        return ("covered",)
    left[0] -= 1
    if left[0] < 0:
        return id(value), kind
    if isinstance(value, _CONTAINERS):
        return _summarise_container(value, lambda part: summarise(part, covered, left))
    if isinstance(value, Tensor):
        return _summarise_tensor(value)
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        return _summarise_live(value)
    if _is_array(value):
        return kind, value.shape, str(value.dtype), _summarise_array(value)
    if _is_generator(value):
        return kind, _state_of_generator(value)
    if _is_own_object(value):
        covered = {*covered, id(value)}
        return kind, [(name, summarise(part, covered, left)) for name, part in list(value.__dict__.items())]
    return id(value), kind


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return True
    return type(value).__module__.startswith("numpy.random") and hasattr(value, "standard_normal")


def _state_of_generator(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return hash_tensor(value.get_state())
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    state = value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state(legacy=False)
    return repr(state)


def _summarise_live(value: nn.Module | torch.optim.Optimizer) -> Any:
    """By torch's version counters: it may be large."""
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
    else:
        parts = [list(one.values()) for one in value.state.values() if isinstance(one, dict)]
        tensors = [part for one in parts for part in one if isinstance(part, Tensor)]
    versions = sum(tensor._version for tensor in tensors if not tensor.is_inference())
    return id(value), len(tensors), versions, getattr(value, "training", None)


def _summarise_container(value: Any, summarise: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return type(value), [(summarise(key), summarise(part)) for key, part in list(value.items())]
    if isinstance(value, set | frozenset):
        return type(value), sorted(str(summarise(part)) for part in value)
    return type(value), [summarise(part) for part in list(value)]


def _summarise_tensor(value: Tensor) -> Any:
    try:
        is_small = value.is_cpu and value.numel() * value.element_size() <= _HASHED_BYTES
        if is_small and value.layout is torch.strided and not value.is_quantized:
            return tuple(value.shape), value.dtype, hash_tensor(value)
        return id(value), value.data_ptr(), 0 if value.is_inference() else value._version
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, on the meta device, a subclass
        return id(value), 0 if value.is_inference() else value._version


def _summarise_array(value: Any) -> Any:
    if value.dtype.hasobject:
        return id(value)
    return hash(value.tobytes()) if value.nbytes <= MAX_TENSOR_BYTES else hash(value.reshape(-1)[::997].tobytes())


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and hasattr(value, "dtype")

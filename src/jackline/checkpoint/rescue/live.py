"""Which objects of a process make up its training: modules, optimizers, schedulers, scalers, and their names.

The script has not told us, so the objects are found by their type among everything that Python keeps track of, and
named by the variables of the frames that lead to the training step (names.py). Owns the search and what is refused.
Calls nothing of the user's: types are compared, attributes are read from dictionaries, no property runs.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from jackline.checkpoint.rescue.names import MAX_DEPTH, Name, Scope, name_objects, reached
from jackline.checkpoint.state.attributes import unwrap
from jackline.checkpoint.state.capture import MAX_KEY
from jackline.errors import JacklineError
from jackline.units import format_bytes

MAX_WORDS = 200  # characters of a text that is kept as a value
_PLAIN = (bool, int, float, str)


class CannotRescue(JacklineError):
    """The state of this process cannot be saved as it is; the text says why."""


@dataclass(frozen=True)
class Part:
    """One object to save under `key`. `expression` is how the frame at `scope` spells it; '' when nobody names it."""

    key: str
    kind: str  # module | optimizer | scheduler | scaler | tensors | stateful
    value: Any
    expression: str = ""
    scope: Scope | None = None
    is_wrapped: bool = False  # the expression names its wrapper (torch.compile, DistributedDataParallel)

    def to_json(self) -> dict[str, Any]:
        found = {
            "key": self.key,
            "kind": self.kind,
            "class": type(self.value).__name__,
            "expression": self.expression,
            "file": self.scope.file if self.scope else "",
            "function": self.scope.function if self.scope else "",
        }
        return {**found, "is_wrapped": True} if self.is_wrapped else found


@dataclass
class Found:
    """What a process has. `values`: numbers and words of the loop's frames. `missing`: what could not be taken."""

    parts: list[Part] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Any]:
        return [part.value for part in self.parts if part.kind in kinds]

    @property
    def place(self) -> Scope | None:
        """The frame that names most of the modules and optimizers: lines that load them go there."""
        scopes = [
            part.scope for part in self.parts if part.kind in ("module", "optimizer") and part.scope is not None
        ]
        return max(scopes, key=lambda one: sum(one is other for other in scopes), default=None)

    @property
    def state(self) -> dict[str, Any]:
        return {part.key: part.value for part in self.parts}


def find_state(scopes: Sequence[Scope], live: Mapping[str, list[Any]] | None = None) -> Found:
    """Everything that trains in this process. The innermost scope comes first. `live`: an earlier `live_objects()`.

    Raises CannotRescue.
    """
    live = live or live_objects()
    names = name_objects(scopes)
    found = Found(values=_plain_values(scopes))
    optimizers = _used_optimizers(live["optimizer"], names)
    trained = {id(value) for one in optimizers for value in _parameters_of(one)}
    modules = _chosen_modules(_roots(live["module"]), names, trained, found)
    for module in modules:
        _refuse_shards(module)
    keys = _Keys()
    known = {id(value) for module in modules for value in _tensors_of(module)}
    loose = [value for one in optimizers for value in _parameters_of(one) if id(value) not in known]
    if not modules and not loose:
        raise CannotRescue("this process has no module with parameters and no optimizer that has stepped")
    _add(found, "module", modules, names, keys, "model")
    _add(found, "optimizer", optimizers, names, keys, "optimizer")
    schedulers = [one for one in live["scheduler"] if id(one) in names or _steps_one_of(one, optimizers)]
    _add(found, "scheduler", _without_inner(schedulers), names, keys, "scheduler")
    _add(found, "scaler", [one for one in live["scaler"] if _is_enabled(one)], names, keys, "scaler")
    if loose:
        found.parts.append(Part(keys.free("loose_parameters"), "tensors", _named_tensors(loose, names)))
    _add_averages(found, modules, scopes, keys)
    _add_stateful(found, scopes, keys)
    return found


class _Keys:
    """Keys of the state: letters, digits and a few signs, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = {"random", "rescue"}

    def free(self, wanted: str) -> str:
        clean = re.sub(r"[^A-Za-z0-9_]+", ".", wanted.removeprefix("self.")).strip(".")[: MAX_KEY - 16] or "part"
        key, number = clean, 1
        while key in self._taken or key.endswith(".outside"):
            number += 1
            key = f"{clean}-{number}"
        self._taken.add(key)
        return key


# -- what is alive ---------------------------------------------------------------------------------------------------


def live_objects() -> dict[str, list[Any]]:
    """All live objects of the types that train. Asks `type(value)`, never `isinstance`, which may run a property."""
    kinds = {
        "optimizer": (torch.optim.Optimizer,),
        "scheduler": (torch.optim.lr_scheduler.LRScheduler,),
        "scaler": (torch.amp.GradScaler,),
        "module": (nn.Module,),
    }
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    wanted: dict[type, str] = {}
    for value in gc.get_objects():
        made = type(value)
        kind = wanted.get(made)
        if kind is None:
            line = made.__mro__
            kind = wanted[made] = next((name for name, types in kinds.items() if types[0] in line), "")
        if kind:
            found[kind].append(value)
    return found


def _children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module.__dict__.get("_modules") or {}


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for word in ("_parameters", "_buffers"):
            yield from (value for value in (one.__dict__.get(word) or {}).values() if value is not None)
        waiting += [child for child in _children_of(one).values() if child is not None]


def _roots(modules: list[nn.Module]) -> list[nn.Module]:
    """Modules that are in no other module, without the wrappers of torch.compile and of parallel training."""
    inner = {id(child) for module in modules for child in _children_of(module).values() if child is not None}
    return list({id(root): root for root in (unwrap(one) for one in modules if id(one) not in inner)}.values())


def _chosen_modules(
    roots: list[nn.Module], names: Mapping[int, Name], trained: set[int], found: Found
) -> list[nn.Module]:
    """Roots with tensors of their own, named ones first. What nobody names and no optimizer trains is left out:
    it may be garbage, or a part of torch."""
    ranked = sorted(roots, key=lambda root: id(root) not in names)
    chosen: list[nn.Module] = []
    others: list[nn.Module] = []
    known: set[int] = set()
    for root in ranked:
        tensors = {id(value) for value in _tensors_of(root)}
        if not tensors or tensors <= known:
            continue
        if why := _why_unreadable(root):
            name = names[id(root)].expression if id(root) in names else "a module"
            found.missing.append(f"{name} ({type(root).__name__}): {why}")
            continue
        is_known = id(root) in names or bool(tensors & trained)
        (chosen if is_known else others).append(root)
        known |= tensors
    copied = {_shape_of(one) for one in chosen}
    for root in others:
        if _shape_of(root) in copied:  # an average of the weights, deep in an object
            chosen.append(root)
            continue
        size = format_bytes(sum(value.numel() * value.element_size() for value in _tensors_of(root)))
        found.missing.append(f"a {type(root).__name__} of {size} that no variable names and no optimizer trains")
    return chosen


def _why_unreadable(module: nn.Module) -> str:
    for value in _tensors_of(module):
        if any(made.__name__ == "UninitializedTensorMixin" for made in type(value).__mro__):
            return "its parameters have no size yet"
        if value.device.type == "meta":
            return "its weights are on the meta device, which has none"
    return ""


def _shape_of(module: nn.Module) -> tuple[Any, ...]:
    return (type(module), *(tuple(value.shape) for value in _tensors_of(module)))


def _parameters_of(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.__dict__.get("param_groups") or ():
        yield from group.get("params", ())


def _used_optimizers(optimizers: list[Any], names: Mapping[int, Name]) -> list[Any]:
    """Named optimizers, and unnamed ones that have stepped for parameters of no other (a wrapper repeats them)."""
    ranked = sorted(optimizers, key=lambda one: id(one) not in names)
    chosen: list[Any] = []
    known: set[int] = set()
    for one in ranked:
        own = {id(value) for value in _parameters_of(one)}
        if own and not own <= known and (id(one) in names or one.__dict__.get("state")):
            chosen.append(one)
            known |= own
    return chosen


def _steps_one_of(scheduler: Any, optimizers: list[Any]) -> bool:
    return any(scheduler.__dict__.get("optimizer") is one for one in optimizers)


def _without_inner(schedulers: list[Any]) -> list[Any]:
    """Without those that a SequentialLR or ChainedScheduler holds: its own state has theirs."""
    held = {id(inner) for one in schedulers for inner in one.__dict__.get("_schedulers") or ()}
    return [one for one in schedulers if id(one) not in held]


def _is_enabled(scaler: Any) -> bool:
    return bool(scaler.__dict__.get("_enabled"))


def _refuse_shards(module: nn.Module) -> None:
    for value in _tensors_of(module):
        words = {made.__name__ for made in type(value).__mro__}
        if words & {"DTensor", "FlatParameter", "ShardedTensor"} or "ds_id" in getattr(value, "__dict__", {}):
            raise CannotRescue(
                f"the parameters of {type(module).__name__} are sharded over processes, and one process has a part",
                hint="save with the library that shards them (torch.distributed.checkpoint)",
            )


# -- parts -----------------------------------------------------------------------------------------------------------


def _add(found: Found, kind: str, values: Iterable[Any], names: Mapping[int, Name], keys: _Keys, word: str) -> None:
    for value in values:
        name = names.get(id(value))
        key = keys.free(name.expression if name else word)
        known = (name.expression, name.scope, name.is_wrapper) if name else ()
        found.parts.append(Part(key, kind, value, *known))


def _plain_values(scopes: Sequence[Scope]) -> dict[str, Any]:
    """Numbers and words of the user's own frames (epoch, step, best loss), from the innermost on."""
    found: dict[str, Any] = {}
    for scope in scopes:
        if scope.is_own:
            for name, value in scope.names.items():
                if type(value) in _PLAIN and not name.startswith("__"):
                    found.setdefault(name, value[:MAX_WORDS] if isinstance(value, str) else value)
    return found


def _named_tensors(values: list[Tensor], names: Mapping[int, Name]) -> dict[str, Tensor]:
    words = [
        names[id(value)].expression if id(value) in names else f"parameter_{index}"
        for index, value in enumerate(values)
    ]
    return dict(zip(words, values, strict=True))


# -- averages and objects of the user's own --------------------------------------------------------------------------


def _add_averages(found: Found, modules: list[nn.Module], scopes: Sequence[Scope], keys: _Keys) -> None:
    """Copies of a module's weights in a plain dict or list, which is how many scripts keep an average (EMA)."""
    shapes = [[tuple(value.shape) for value in module.parameters()] for module in modules]
    words = [set(dict(module.named_parameters())) for module in modules]
    own = {id(value) for module in modules for value in _tensors_of(module)}
    for value, expression, scope in reached(scopes, MAX_DEPTH):
        if type(value) is dict and value and all(type(one) is Tensor for one in value.values()):
            is_copy = any(set(value) >= known and known for known in words)
        elif type(value) is list and value and all(Tensor in type(one).__mro__ for one in value):
            is_copy = [tuple(one.shape) for one in value] in shapes and not {id(one) for one in value} & own
        else:
            continue
        if is_copy:
            found.parts.append(Part(keys.free(expression), "tensors", value, expression, scope))


def _add_stateful(found: Found, scopes: Sequence[Scope], keys: _Keys) -> None:
    """Objects of the user's own frames that have state_dict and load_state_dict (an average, a sampler)."""
    known = {id(part.value) for part in found.parts}
    held = {id(one) for part in found.parts for one in (part.value.values() if type(part.value) is dict else ())}
    for value, expression, scope in reached(scopes, MAX_DEPTH - 1):
        made = type(value)
        if id(value) in known | held or made.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        is_stateful = all(any(word in kind.__dict__ for kind in made.__mro__) for word in _STATEFUL)
        if is_stateful and not {nn.Module, torch.optim.Optimizer} & set(made.__mro__):
            known.add(id(value))
            found.parts.append(Part(keys.free(expression), "stateful", value, expression, scope))


_STATEFUL = ("state_dict", "load_state_dict")

"""Restores a checkpoint into live objects: into the existing tensors, keeping their strides, ties and addresses.

Works in three steps: fit (nothing is changed; what does not fit is refused by name), read (tensors, verified on the
way), apply (everything else; RNG states last). Damage means that bytes are wrong and an older checkpoint may work;
CannotResume means that the program has changed and no checkpoint will work.
Owns the restore of one checkpoint. Does not choose the checkpoint (load.py).
"""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jackline import accelerator
from jackline.checkpoint.format.hashing import digest_chunks
from jackline.checkpoint.format.manifest import MAX_STATE_BYTES, STATE, TENSORS, Damage, Manifest, parse_json
from jackline.checkpoint.format.regions import SHARDED
from jackline.checkpoint.format.tree import KIND, NOT_A_LEAF, decode, decode_bytes
from jackline.checkpoint.format.verify import check_sizes, read_header, read_manifest, wrong_chunk
from jackline.checkpoint.machines.holding import PARTS_OF
from jackline.checkpoint.state import rng as random_state
from jackline.checkpoint.state.attributes import unwrap
from jackline.checkpoint.state.fitting import HINT, Fitting
from jackline.checkpoint.state.frozen import HashTensor
from jackline.checkpoint.state.outside import clean_name
from jackline.checkpoint.state.restore_optimizer import fit_optimizer, require_same_class
from jackline.checkpoint.state.restore_outside import fit_outside
from jackline.errors import CannotResume
from jackline.rundir.access.reading import read_whole


@dataclass(frozen=True)
class Restored:
    """What was restored from one checkpoint, and what was not."""

    manifest: Manifest
    keys: tuple[str, ...]
    not_restored: tuple[str, ...]
    notes: tuple[str, ...]


def restore_checkpoint(
    folder: Path, into: MutableMapping[str, Any], *, hash_frozen: HashTensor, is_picky: bool = False
) -> Restored:
    """Restore the whole checkpoint in `folder` into the objects in `into`, key by key.

    `is_picky`: files from which this process needs nothing are not read; somebody else verifies them.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    is_picky = is_picky or isinstance(manifest.facts.get(PARTS_OF), list)  # the other parts are on other machines
    tree = _read_state(folder, manifest)
    headers = {
        entry.name.removesuffix(TENSORS): read_header(folder / entry.name, entry.size_bytes)
        for entry in manifest.files
        if entry.name.endswith(TENSORS)
    }
    fitting = Fitting(headers, hash_frozen, is_picky=is_picky)
    for key in into:
        if key in tree:
            _assign(into, key, fit(tree[key], into[key], key, fitting), fitting)
    fitting.carry_out(folder, manifest)
    fitting.apply()
    missing = [f"{key} (not in the checkpoint, left as it is)" for key in into if key not in tree]
    unused = [f"{key} (in the checkpoint, nobody asked for it)" for key in tree if key not in into]
    keys = tuple(key for key in into if key in tree)
    return Restored(manifest, keys, tuple(missing + unused), tuple(fitting.notes))


def fit(node: Any, existing: Any, where: str, fitting: Fitting) -> Any:
    """The value that belongs at `where`: `existing` itself when it can be filled, else a new one."""
    try:
        return _fit(node, existing, where, fitting)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        raise Damage(f"state.json: {where} cannot be read ({type(problem).__name__})") from None


def _fit(node: Any, existing: Any, where: str, fitting: Fitting) -> Any:
    kind = node.get(KIND) if isinstance(node, dict) else None
    again = partial(_fit_part, fitting)
    if kind in ("tensor", SHARDED):
        return fitting.tensor(node, where, existing if isinstance(existing, Tensor) else None)
    if kind == "module":
        return _fit_module(node, _require(existing, nn.Module, where), where, fitting)
    if kind == "optimizer":
        optimizer = _require(existing, torch.optim.Optimizer, where)
        fit_optimizer(node, optimizer, where, fitting, again)
        fit_outside(node.get("outside"), optimizer, where, fitting, again)
        return optimizer
    if kind == "stateful":
        return _fit_stateful(node, existing, where, fitting)
    if kind is not None and kind in _RNG_STATE:
        return _fit_rng_state(node, existing, where, fitting)
    if isinstance(existing, dict) and _is_mapping(node):
        return _fit_mapping(node, existing, where, fitting)
    if isinstance(existing, list | tuple | deque | set | bytearray):
        value = _fit_sequence(node, kind, existing, where, fitting)
        if value is not NOT_A_LEAF:
            return value
    if kind == "array" and _is_array(existing):
        return _fit_array(node, existing, where, fitting)
    return decode(node, where, lambda part, at: _fresh(part, at, fitting))


def _fit_sequence(node: Any, kind: Any, existing: Any, where: str, fitting: Fitting) -> Any:
    """Fill the existing object, so that whoever else holds it sees the restored contents."""
    if isinstance(existing, list) and isinstance(node, list):
        values = [fit(part, _at(existing, n), f"{where}.{n}", fitting) for n, part in enumerate(node)]
        fitting.then.append(lambda: existing.__setitem__(slice(None), values))
        return existing
    if isinstance(existing, tuple) and kind == "tuple":
        values = [fit(part, _at(existing, n), f"{where}.{n}", fitting) for n, part in enumerate(node["items"])]
        if len(values) == len(existing) and all(map(operator.is_, values, existing)):
            return existing
        return type(existing)(*values) if hasattr(existing, "_fields") else tuple(values)
    if isinstance(existing, deque) and kind == "deque":
        if node["maxlen"] != existing.maxlen:
            sizes = f"{node['maxlen']} in the checkpoint, {existing.maxlen} in the program"
            raise CannotResume(f"{where} does not fit: maxlen is {sizes}", hint=HINT)
        old = list(existing)
        values = [fit(part, _at(old, n), f"{where}.{n}", fitting) for n, part in enumerate(node["items"])]
        fitting.then += [existing.clear, partial(existing.extend, values)]
        return existing
    if isinstance(existing, set | bytearray) and kind == type(existing).__name__:
        value = decode(node, where, lambda part, at: _fresh(part, at, fitting))
        add: Any = existing.update if isinstance(existing, set) else existing.extend
        fitting.then += [existing.clear, partial(add, value)]
        return existing
    return NOT_A_LEAF


def _is_array(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "setflags")


def _fit_array(node: dict[str, Any], existing: Any, where: str, fitting: Fitting) -> Any:
    """Into the array itself: the loop, a sampler or another view holds the same memory."""
    saved = _fresh_numpy(node, where, fitting)
    if saved.shape != existing.shape or saved.dtype != existing.dtype.newbyteorder("="):
        kinds = [f"{one.dtype}{list(one.shape)}" for one in (saved, existing)]
        raise CannotResume(f"{where} does not fit: the checkpoint has {kinds[0]}, the program {kinds[1]}", hint=HINT)

    def fill() -> None:
        if existing.flags.writeable:
            existing[...] = saved
        elif saved.tobytes() != existing.astype(saved.dtype).tobytes():
            raise CannotResume(f"{where} is read-only and not as saved", hint="pass an array that can be written")

    fitting.then.append(fill)
    return existing


def _fit_part(fitting: Fitting, node: Any, existing: Any, where: str) -> Any:
    return fit(node, existing, where, fitting)


def _fresh(node: dict[str, Any], where: str, fitting: Fitting) -> Any:
    """A new value, for a node that has no live counterpart."""
    kind = node[KIND]
    if kind in ("tensor", SHARDED):
        return fitting.tensor(node, where, None)
    if kind in ("array", "numpy scalar"):
        return _fresh_numpy(node, where, fitting)
    if kind == "dtype":
        return getattr(torch, str(node["name"])) if str(node["name"]).isidentifier() else None
    if kind == "device":
        return torch.device(str(node["name"]))
    if kind in _RNG_STATE:
        return _fit_rng_state(node, None, where, fitting)
    if kind in ("module", "optimizer", "stateful"):
        raise CannotResume(f"{where} was a {node.get('class')} when it was saved and is missing now", hint=HINT)
    return NOT_A_LEAF


def _fit_module(node: dict[str, Any], module: nn.Module, where: str, fitting: Fitting) -> nn.Module:
    inner = unwrap(module)
    live = {clean_name(name): value for name, value in inner.state_dict(keep_vars=True).items()}
    tensors, extra, left_out = node["tensors"], node.get("extra", {}), node.get("left_out", {})
    _require_same_names({*tensors, *extra, *left_out}, set(live), where)
    for name, part in tensors.items():
        fitting.tensor(part, f"{where}.{name}", live[name])
    for name, part in left_out.items():
        if fitting.hash_frozen(live[name].detach()) != part["hash"]:
            raise CannotResume(
                f"{where}.{name} was frozen and left out of the checkpoint, and is not the same now",
                hint="load the same frozen weights before resuming",
            )
    for name, part in extra.items():
        value = decode(part, f"{where}.{name}", lambda inner_node, at: _fresh(inner_node, at, fitting))
        owner = inner.get_submodule(name.rpartition(".")[0])
        fitting.then.append(partial(owner.set_extra_state, value))
    fit_outside(node.get("outside"), inner, where, fitting, partial(_fit_part, fitting))
    return module


def _fit_stateful(node: dict[str, Any], existing: Any, where: str, fitting: Fitting) -> Any:
    if not hasattr(existing, "load_state_dict"):
        raise CannotResume(
            f"{where} was a {node.get('class')} when it was saved and is a {type(existing).__name__} now", hint=HINT
        )
    if isinstance(existing, torch.optim.Optimizer):
        require_same_class(node, existing, where)
    value = decode(node["state"], where, lambda part, at: _fresh(part, at, fitting))
    is_rng_state = isinstance(existing, random_state.ProcessRandom)
    (fitting.at_last if is_rng_state else fitting.then).append(lambda: existing.load_state_dict(value))
    if isinstance(existing, torch.optim.Optimizer):
        fit_outside(node.get("outside"), existing, where, fitting, partial(_fit_part, fitting))
    return existing


_RNG_STATE = ("torch generator", "python random", "numpy generator", "numpy random state")


def _fit_rng_state(node: dict[str, Any], existing: Any, where: str, fitting: Fitting) -> Any:
    kind = node[KIND]
    state = decode(node["state"], where, lambda *_: NOT_A_LEAF)
    if kind == "torch generator":
        generator = existing if isinstance(existing, torch.Generator) else torch.Generator(_device(node))
        fitting.at_last.append(lambda: random_state.write_generator(generator, state))
        return generator
    if kind == "python random":
        own = existing if isinstance(existing, random.Random) else random.Random()
        fitting.at_last.append(lambda: own.setstate(random_state.unpack_python(state)))
        return own
    return _fit_numpy_rng_state(kind, state, existing, fitting)


def _fit_numpy_rng_state(kind: str, state: Any, existing: Any, fitting: Fitting) -> Any:
    import numpy

    unpacked = random_state.unpack_numpy(state)
    if kind == "numpy random state":
        own = existing if isinstance(existing, numpy.random.RandomState) else numpy.random.RandomState()
        fitting.at_last.append(lambda: own.set_state(unpacked))
        return own
    if isinstance(existing, numpy.random.Generator):
        generator = existing
    else:
        makers = {"PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"}
        name = str(unpacked["bit_generator"])
        if name not in makers:
            raise ValueError(name)
        generator = numpy.random.Generator(getattr(numpy.random, name)())
    fitting.at_last.append(lambda: setattr(generator.bit_generator, "state", unpacked))
    return generator


def _fresh_numpy(node: dict[str, Any], where: str, fitting: Fitting) -> Any:
    import numpy

    if node[KIND] == "array":
        return fitting.tensor(node["tensor"], where, None).numpy()
    return numpy.frombuffer(decode_bytes(node["value"]), dtype=numpy.dtype(str(node["dtype"])))[0]


def _fit_mapping(node: Any, existing: dict[Any, Any], where: str, fitting: Fitting) -> dict[Any, Any]:
    if KIND in node:
        pairs = [(decode(key, where, lambda *_: NOT_A_LEAF), part) for key, part in node["items"]]
    else:
        pairs = list(node.items())
    for key, part in pairs:
        _assign(existing, key, fit(part, existing.get(key), f"{where}.{key}", fitting), fitting)
    saved = [key for key, _ in pairs]
    left = [str(key) for key in existing if key not in set(saved)]
    if left and fitting.is_exact:
        fitting.then.append(partial(_remove_others, existing, set(saved)))
    elif left:
        fitting.notes.append(f"{where}: {_some(left)} not in the checkpoint, left as they are")
    fitting.then.append(partial(_put_in_order, existing, saved))
    return existing


def _remove_others(existing: dict[Any, Any], keys: set[Any]) -> None:
    for key in [key for key in existing if key not in keys]:
        del existing[key]


def _put_in_order(existing: dict[Any, Any], keys: list[Any]) -> None:
    """The order of a dict is state too: a loop may take its oldest entry."""
    if list(existing)[: len(keys)] != keys:
        for key in [*keys, *(key for key in existing if key not in set(keys))]:
            existing[key] = existing.pop(key)


def _assign(into: MutableMapping[Any, Any], key: Any, value: Any, fitting: Fitting) -> None:
    if key not in into or into[key] is not value:
        fitting.then.append(lambda: into.__setitem__(key, value))


def _read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    entry = manifest.file(STATE)
    if entry is None or entry.size_bytes > MAX_STATE_BYTES:
        raise Damage(f"{STATE} is missing or too large")
    try:
        data = read_whole(folder / STATE, entry.size_bytes)
    except OSError as problem:
        raise Damage(f"{STATE} cannot be read: {problem.strerror}") from None
    if digest_chunks(manifest.algorithm, memoryview(data)) != entry.chunks:
        raise wrong_chunk(STATE, 0, len(data))
    tree = parse_json(data, STATE)
    if not isinstance(tree, dict):
        raise Damage(f"{STATE} is not an object")
    return tree


def _require_same_names(saved: set[str], live: set[str], where: str) -> None:
    if saved == live:
        return
    detail = []
    if saved - live:
        detail.append(f"only in the checkpoint: {_some(sorted(saved - live))}")
    if live - saved:
        detail.append(f"only in the program: {_some(sorted(live - saved))}")
    raise CannotResume(f"{where} is not the model that was saved", detail=tuple(detail), hint=HINT)


def _require(existing: Any, kind: type, where: str) -> Any:
    if not isinstance(existing, kind):
        raise CannotResume(
            f"{where} was a {kind.__name__} when it was saved and is a {type(existing).__name__} now", hint=HINT
        )
    return existing


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _at(existing: Any, index: int) -> Any:
    return existing[index] if index < len(existing) else None


def _is_mapping(node: Any) -> bool:
    return isinstance(node, dict) and node.get(KIND, "dict") in ("dict", "ordered", "counter")


def _device(node: dict[str, Any]) -> str:
    return str(accelerator.choose()) if node.get("device", "cpu") not in ("cpu", "meta") else "cpu"

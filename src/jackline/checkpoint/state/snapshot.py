"""A state copied in memory, and returned to in the same process: what a checkpoint does, without files.

A resumed program has just built its objects. Here they have been trained meanwhile. So attributes and entries that
did not exist are removed, and every attribute is kept, not only the changed ones. Owns the copy in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jackline.checkpoint.format.header import Header, lay_out
from jackline.checkpoint.state.attributes import (
    Baseline,
    Found,
    Parts,
    Root,
    find_hidden_buffers,
    find_roots,
    named_parts,
    walk,
)
from jackline.checkpoint.state.capture import Captured, Source, capture
from jackline.checkpoint.state.dtypes import stored_dtype, stored_shape
from jackline.checkpoint.state.fitting import Fitting
from jackline.checkpoint.state.frozen import FrozenHashes
from jackline.checkpoint.state.restore import fit


class _Everything(Baseline):
    """Every attribute counts as changed."""

    def changed(self, root: Root, parts: Parts | None = None) -> list[Found]:
        return list(walk(root))

    def is_changed_buffer(self, root: nn.Module, name: str, buffer: Tensor) -> bool:
        return True


@dataclass(frozen=True)
class Snapshot:
    """One instant of a state. `known`: the attributes and hidden buffers that existed, by object."""

    captured: Captured
    tensors: dict[tuple[str, str], Tensor]
    known: dict[int, set[tuple[str, str]]]


def take_snapshot(state: Mapping[str, Any]) -> Snapshot:
    """Copies every tensor of the state."""
    captured = capture(state, baseline=_Everything())
    tensors = {(source.key, source.name): source.tensor.detach().clone() for source in captured.sources}
    return Snapshot(captured, tensors, {id(root): set(_names(root)) for root in find_roots(state)})


def return_to(snapshot: Snapshot, into: MutableMapping[str, Any]) -> None:
    """Put the objects in `into` back to that instant."""
    for root in find_roots(into):
        _remove_new(root, snapshot.known.get(id(root), set()))
    fitting = Fitting(_headers(snapshot.captured.sources), FrozenHashes(), is_exact=True)
    filled = {key: fit(node, into.get(key), key, fitting) for key, node in snapshot.captured.tree.items()}
    with torch.no_grad():
        for file, targets in fitting.targets.items():
            for name, target in targets.items():
                target.tensor.copy_(snapshot.tensors[file, name])
        for place, first in fitting.copies:
            place.copy_(first)
    fitting.apply()
    into.update(filled)


def _headers(sources: Iterable[Source]) -> dict[str, Header]:
    by_key: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for source in sources:
        described = (source.name, stored_dtype(source.tensor.dtype), stored_shape(source.tensor))
        by_key.setdefault(source.key, []).append(described)
    return {key: Header(lay_out(tensors), 0) for key, tensors in by_key.items()}


def _names(root: nn.Module | torch.optim.Optimizer) -> Iterable[tuple[str, str]]:
    yield from ((found.owner, found.path) for found in walk(root))
    if isinstance(root, nn.Module):
        yield from (("buffer", name) for name in find_hidden_buffers(named_parts(root)))


def _remove_new(root: nn.Module | torch.optim.Optimizer, known: set[tuple[str, str]]) -> None:
    """Attributes that training has created: the program that resumes does not have them either."""
    parts: dict[str, Any] = named_parts(root) if isinstance(root, nn.Module) else {"": root}
    for found in list(walk(root)):
        if (found.owner, found.path) not in known and "." not in found.path:
            parts[found.owner].__dict__.pop(found.path, None)
    if isinstance(root, nn.Module):
        for name, (owner, short, _) in find_hidden_buffers(named_parts(root)).items():
            if ("buffer", name) not in known:
                del owner._buffers[short]

"""Which stored tensor goes into which live one, and which steps follow. Nothing is changed yet.

Refuses by name what does not fit: another shape, another dtype, memory that is shared now and was not when it was
saved. Owns the list; restore.py fills it, `carry_out` executes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jackline import accelerator
from jackline.checkpoint.format.header import Header, StoredTensor
from jackline.checkpoint.format.manifest import TENSORS, Damage, FileEntry, Manifest
from jackline.checkpoint.format.regions import SHARDED, overlap, parse_parts, whole_of
from jackline.checkpoint.format.tree import KIND
from jackline.checkpoint.shards import is_distributed, is_divided, local_of, region_of
from jackline.checkpoint.state.dtypes import dtype_name, parse_dtype, torch_dtype
from jackline.checkpoint.state.frozen import HashTensor
from jackline.checkpoint.state.read import Target, read_tensors
from jackline.errors import CannotResume

HINT = "build what was saved (jackline.peek(name) gives its step and epoch before that), or start a new run"


@dataclass
class Fitting:
    """One restore in preparation. `is_exact`: entries that a dict did not have are removed, not left."""

    headers: dict[str, Header]
    hash_frozen: HashTensor
    is_exact: bool = False
    is_picky: bool = False  # read only the files that something is needed from
    targets: dict[str, dict[str, Target]] = field(default_factory=dict)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    then: list[Callable[[], Any]] = field(default_factory=list)
    at_last: list[Callable[[], Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _index: dict[tuple[str, str], StoredTensor] = field(default_factory=dict)
    _owners: dict[int, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for file, header in self.headers.items():
            self._index.update({(file, tensor.name): tensor for tensor in header.tensors})

    def tensor(self, node: dict[str, Any], where: str, existing: Tensor | None, device: Any = None) -> Tensor:
        """The existing tensor, to be filled, or a new one when there is none."""
        shape, dtype = self.shape_of(node, where)
        if existing is None:
            existing = _new_tensor(node, shape, dtype, device or _usable(node.get("device")))
        elif tuple(existing.shape) != shape or existing.dtype != dtype:
            kinds = _kind(shape, dtype), _kind(tuple(existing.shape), existing.dtype)
            raise CannotResume(
                f"{where} does not fit: the checkpoint has {kinds[0]}, the program {kinds[1]}", hint=HINT
            )
        self._aim_all(node, existing, where)
        return existing

    def shape_of(self, node: dict[str, Any], where: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the whole tensor that a node stands for."""
        if node.get(KIND) == SHARDED:
            shape, parts = parse_parts(node)
            for file, name, region in parts:
                found = self._index.get((file, name))
                if file not in self.headers and self.is_picky:
                    continue  # the part of another rank, on another machine
                if found is None or found.shape[: len(shape)] != region.shape:
                    raise Damage(f"state.json: {where} refers to a part that is not in {file}{TENSORS}")
            known = parse_dtype(str(node["dtype"]))
        else:
            stored = self._index.get((str(node.get("file")), str(node.get("name"))))
            if stored is None:
                raise Damage(f"state.json: {where} refers to a tensor that is in no file")
            known = parse_dtype(str(node["dtype"])) if "dtype" in node else torch_dtype(stored.dtype)
            shape = stored.shape[:-1] if known is not None and known.is_complex else stored.shape
        if known is None:
            raise Damage(f"state.json: {where} has an unknown kind of number")
        return shape, known

    def fits(self, node: dict[str, Any], existing: Tensor) -> bool:
        """Whether the stored tensor has the shape and the dtype of an existing one."""
        try:
            return self.shape_of(node, "") == (tuple(existing.shape), existing.dtype)
        except (Damage, KeyError, ValueError, TypeError):
            return False

    def carry_out(self, folder: Path, manifest: Manifest) -> None:
        """Read every tensor file, needed or not: a damaged file is damage, even if nothing from it was asked for."""
        for entry in manifest.files:
            is_needed = bool(self.targets.get(entry.name.removesuffix(TENSORS))) or not self.is_picky
            if entry.name.endswith(TENSORS) and is_needed:
                self._read(folder, entry, manifest.algorithm)
        with torch.no_grad():
            for place, first in self.copies:
                place.copy_(first)

    def apply(self) -> None:
        """Apply everything that is not a tensor; RNG states last: applying the rest may draw random numbers."""
        for action in self.then + self.at_last:
            action()

    def _read(self, folder: Path, entry: FileEntry, algorithm: str) -> None:
        file = entry.name.removesuffix(TENSORS)
        wanted = list(self.targets.get(file, {}).values())
        read_tensors(folder / entry.name, entry, self.headers[file], wanted, algorithm)
        for target in wanted:
            if not target.tensor.is_inference():
                torch.autograd.graph.increment_version(target.tensor)  # torch did not see that write

    def _aim_all(self, node: dict[str, Any], existing: Tensor, where: str) -> None:
        """Every stored part that overlaps with the memory of this process, and only that."""
        local, here = local_of(existing).detach(), region_of(existing, where)
        if node.get(KIND) != SHARDED:
            at = (str(node.get("file")), str(node.get("name")))
            is_part = is_distributed(existing) and is_divided(existing, where)
            box = here.inside(whole_of(existing.shape)) if is_part else None
            if local.numel() or not is_part:
                self._aim(at, Target(at[1], local, box), where)
            return
        for file, name, region in parse_parts(node)[1]:
            if (both := overlap(here, region)) is not None:
                if file not in self.headers:
                    raise Damage(f"{where} needs {file}{TENSORS}, which is on another machine")
                memory = local[both.inside(here)] if both != here else local
                self._aim((file, name), Target(name, memory, both.inside(region)), where)

    def _aim(self, at: tuple[str, str], target: Target, where: str) -> None:
        tensor = target.tensor
        owner = self._owners.setdefault(tensor.data_ptr(), at) if tensor.numel() else at
        if owner != at and self.targets[owner[0]][owner[1]].tensor.shape == tensor.shape:
            raise CannotResume(
                f"{where} shares its memory with {owner[1]} now, but did not when it was saved", hint=HINT
            )
        first = self.targets.setdefault(at[0], {}).setdefault(at[1], target).tensor
        if first.data_ptr() != tensor.data_ptr():
            self.copies.append((tensor, first))  # tied when saved, separate now


def _new_tensor(node: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    stride = node.get("stride")
    if isinstance(stride, list) and len(stride) == len(shape) and _is_dense(shape, stride):
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


def _is_dense(shape: tuple[int, ...], stride: list[Any]) -> bool:
    """Only a true permutation is rebuilt as it was: else strides from a file could ask for any amount of memory."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _usable(device: Any) -> str:
    return str(accelerator.choose()) if device not in (None, "cpu", "meta") else "cpu"


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)}{list(shape)}"

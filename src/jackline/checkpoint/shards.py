"""A tensor that is divided over ranks (DTensor, FSDP2): which part of it is here, and where the other parts are.

The rule of torch decides who holds what, so every rank knows all parts without asking: a dimension of n rows over k
ranks gives each ceil(n / k) of them, and the last ones less or nothing. It is compared with the rank's own part.
Owns what torch says of such a tensor. Copies nothing and reads no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jackline.checkpoint.format.regions import SHARDED, Region, parse_parts, whole_of
from jackline.checkpoint.format.tree import KIND, CannotSave

_HINT = "attach() saves tensors that fully_shard() divides by one dimension, and replicated ones"


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor. Its class is not imported: that costs a second where nothing is distributed."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "_local_tensor")


def local_of(tensor: Any) -> Tensor:
    """The memory of this rank's part; of any other tensor, itself."""
    found: Tensor = tensor._local_tensor if is_distributed(tensor) else tensor
    return found


def region_of(tensor: Any, where: str = "a tensor") -> Region:
    """The part of this rank; of any other tensor, all of it. Raises CannotSave for what has no such part."""
    if not is_distributed(tensor):
        return whole_of(tensor.shape)
    mesh, sharding = tensor.device_mesh, _sharding(tensor, where)
    here = mesh.get_coordinate()
    if here is None:
        raise CannotSave(f"{where} has no part on this rank: it is outside of its mesh", hint=_HINT)
    region = _region(tuple(tensor.shape), tuple(mesh.shape), here, sharding)
    if region.shape != tuple(tensor._local_tensor.shape):
        told = f"{list(region.shape)} expected, {list(tensor._local_tensor.shape)} found"
        raise CannotSave(f"{where} is divided in a way that is not known here ({told})", hint=_HINT)
    return region


def parts_of(tensor: Any, where: str) -> dict[int, Region]:
    """Who stores what: the region of every rank that has one of its own. Copies of a part are stored once."""
    mesh, sharding = tensor.device_mesh, _sharding(tensor, where)
    region_of(tensor, where)
    found: dict[int, Region] = {}
    for place in itertools.product(*(range(size) for size in mesh.shape)):
        if any(number and dim is None for number, dim in zip(place, sharding, strict=True)):
            continue  # a copy of the part of another rank
        region = _region(tuple(tensor.shape), tuple(mesh.shape), place, sharding)
        if region.numel:
            found[int(mesh.mesh[place])] = region
    return found


def is_divided(tensor: Any, where: str) -> bool:
    """False for a distributed tensor of which every rank has all."""
    return any(dim is not None for dim in _sharding(tensor, where))


def _sharding(tensor: Any, where: str) -> list[int | None]:
    """For each dimension of the mesh, the dimension of the tensor that is divided over it; None: copies."""
    found: list[int | None] = []
    for placement in tensor.placements:
        if placement.is_replicate():
            found.append(None)
        elif placement.is_shard() and type(placement).__name__ == "Shard" and placement.dim not in found:
            found.append(int(placement.dim) % max(1, tensor.dim()))
        else:
            raise CannotSave(f"{where} cannot be saved: it is distributed as {placement}", hint=_HINT)
    return found


def _region(
    shape: tuple[int, ...], mesh: tuple[int, ...], place: Sequence[int], sharding: list[int | None]
) -> Region:
    offsets, sizes = [0] * len(shape), list(shape)
    for number, count, dim in zip(place, mesh, sharding, strict=True):
        if dim is None:
            continue
        chunk = -(-shape[dim] // count)
        offsets[dim] = min(shape[dim], number * chunk)
        sizes[dim] = min(chunk, shape[dim] - offsets[dim])
    return Region(tuple(offsets), tuple(sizes))


def empty_beside(parameter: Any, shape: tuple[int, ...], dtype: torch.dtype, node: dict[str, Any]) -> Tensor | None:
    """A new tensor for the state of an optimizer that has none yet, divided as `parameter` is. None: a plain one."""
    if not is_distributed(parameter):
        return None
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if node.get(KIND) != SHARDED or parameter.device_mesh.ndim != 1:
        return None
    from torch.distributed.tensor import Shard, empty

    first = parse_parts(node)[1][0][2]
    dims = [dim for dim, (part, size) in enumerate(zip(first.shape, shape, strict=True)) if part != size]
    return empty(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=[Shard(dims[0] if dims else 0)])

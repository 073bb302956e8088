"""Parts of a tensor that several files hold: boxes inside it, their overlap, and their bytes.

    {"jackline": "sharded", "shape": [10, 6], "dtype": "float32", "parts": [
        {"file": "model.rank-0", "name": "0.weight", "offsets": [0, 0], "shape": [5, 6]}, ...]}

Owns this node of state.json, as it is read. Every number is checked: the bytes may come from anybody.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jackline.immutable import immutable

SHARDED = "sharded"  # the kind of the node


@immutable
class Region:
    """A box inside a tensor: where it begins, and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def inside(self, other: Region) -> tuple[slice, ...]:
        """This box as slices of the other, which contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offsets, other.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def whole_of(shape: Sequence[int]) -> Region:
    return Region((0,) * len(shape), tuple(shape))


def overlap(one: Region, other: Region) -> Region | None:
    """What both have; None where that is nothing."""
    starts = [max(pair) for pair in zip(one.offsets, other.offsets, strict=True)]
    ends = [min(a + b, c + d) for a, b, c, d in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return Region(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))


def runs_of(region: Region, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where the elements of a box are in the whole tensor: (first, count) of every unbroken piece, in their order."""
    dims = len(shape)
    last = next((dim for dim in range(dims - 1, -1, -1) if region.shape[dim] != shape[dim]), 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(dims)]
    count = math.prod(region.shape[last:])
    for place in itertools.product(*(range(size) for size in region.shape[:last])):
        first = sum(
            (start + number) * stride for start, number, stride in zip(region.offsets, place, strides, strict=False)
        )
        rest = sum(region.offsets[dim] * strides[dim] for dim in range(last, dims))
        yield first + rest, count


def parse_parts(node: dict[str, Any]) -> tuple[tuple[int, ...], list[tuple[str, str, Region]]]:
    """The shape of a sharded node and its parts: file, name, region. Raises ValueError for nonsense."""
    shape = tuple(int(size) for size in node["shape"])
    parts = []
    for part in node["parts"]:
        region = Region(tuple(map(int, part["offsets"])), tuple(map(int, part["shape"])))
        is_inside = len(region.shape) == len(shape) == len(region.offsets) and all(
            start >= 0 and size > 0 and start + size <= end
            for start, size, end in zip(region.offsets, region.shape, shape, strict=True)
        )
        if not is_inside:
            raise ValueError("a part lies outside of its tensor")
        parts.append((str(part["file"]), str(part["name"]), region))
    if sum(region.numel for _, _, region in parts) != math.prod(shape):
        raise ValueError("its parts do not make up the tensor")
    _refuse_overlap([region for _, _, region in parts])
    return shape, parts


def _refuse_overlap(regions: list[Region]) -> None:
    """Raise ValueError where two parts have something in common: then something else would be filled by none.

    Goes along the dimension with the most parts, so that hundreds of ranks are compared with few others each.
    """
    dims = range(len(regions[0].shape)) if regions else ()
    along = max(dims, key=lambda dim: len({region.offsets[dim] for region in regions}), default=None)
    if along is None:
        return
    open_ones: list[Region] = []
    for region in sorted(regions, key=lambda region: region.offsets[along]):
        open_ones = [one for one in open_ones if one.offsets[along] + one.shape[along] > region.offsets[along]]
        if any(overlap(region, one) is not None for one in open_ones):
            raise ValueError("its parts overlap")
        open_ones.append(region)

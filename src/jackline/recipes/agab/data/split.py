"""Which pair is for training, validation and test.

Owns: 70/15/15 by antigen group (an antigen's sequence is in one part only) or by random pairs, as a pure function of
the seed and the antigens' hashes; the words about what came out. Nothing here uses a library's random generator: the
same seed must give the same parts for ever. Does not own the order of an epoch.

An antigen is its exact sequence: two mutants of one protein are two antigens and may fall into different parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jackline.data.loader.order import Permutation, mix
from jackline.errors import UsageError
from jackline.recipes.agab.data.pairs import Hashes

Split = Literal["antigen", "random"]
PARTS = ("train", "validation", "test")
SHARES = (0.70, 0.15, 0.15)
# A group larger than this share of validation or test would be most of what is measured there.
_LARGEST_SHARE_OF_PART = 1 / 3
_FEW_ANTIGENS = 10
_MAX_MISS = 0.05
_WORD = 1 << 64

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Ascending pair numbers of each part, and what a person should know about them."""

    indices: dict[str, Indices]
    lines: tuple[str, ...]


def split_pairs(antigen_row: NDArray[np.int32], antigens: Hashes, split: str, seed: int) -> Parts:
    """The three parts of the pairs whose antigens are the rows `antigen_row` of `antigens`."""
    if split == "random":
        return _described(_random_parts(len(antigen_row), seed), antigen_row, split)
    if split != "antigen":
        raise UsageError(f"split is '{split}'", hint="it must be one of: antigen, random")
    if len(antigens) < len(PARTS):
        raise UsageError(
            f"a split by antigen needs at least 3 antigens, and there {_are(len(antigens))}",
            hint="split=random splits the pairs instead; its scores say nothing about new antigens",
        )
    sizes = np.bincount(antigen_row, minlength=len(antigens))
    part_of = np.array(assign_groups(sizes.tolist(), antigens, seed), np.int8)
    of_pair = part_of[antigen_row]
    parts = {name: np.flatnonzero(of_pair == number) for number, name in enumerate(PARTS)}
    return _described(parts, antigen_row, split)


def assign_groups(sizes: list[int], antigens: Hashes, seed: int) -> list[int]:
    """The part of every group: large groups first, each where rows are wanted most by a keyed draw.

    Groups come in classes of size (powers of two) so that small ones are left to even out the shares at the end;
    inside a class and in the draw the seed decides.
    """
    keys = [mix(seed, int(high), int(low)) for high, low in antigens.tolist()]
    order = sorted(range(len(sizes)), key=lambda group: (-sizes[group].bit_length(), keys[group]))
    target = [share * sum(sizes) for share in SHARES]
    wanted = list(target)
    chosen = [0] * len(sizes)
    for group in order:
        part = _draw(sizes[group], wanted, target, mix(keys[group], 1) / _WORD)
        chosen[group] = part
        wanted[part] -= sizes[group]
    _fill_empty_parts(chosen, sizes, keys)
    return chosen


def _draw(size: int, wanted: list[float], target: list[float], rng_state: float) -> int:
    """A part the group fits into, likelier the more it wants; where it fits nowhere, the one that wants most."""
    room = [
        max(0.0, left) if size <= left and (part == 0 or size <= target[part] * _LARGEST_SHARE_OF_PART) else 0.0
        for part, left in enumerate(wanted)
    ]
    if not any(room):
        return max(range(len(wanted)), key=lambda part: wanted[part])
    at = rng_state * sum(room)
    for part, width in enumerate(room):
        at -= width
        if at < 0:
            return part
    return max(range(len(room)), key=lambda part: room[part])


def _fill_empty_parts(chosen: list[int], sizes: list[int], keys: list[int]) -> None:
    """With a handful of groups the draw may leave a part without any: it gets the smallest group of the richest."""
    for part in range(len(PARTS)):
        if part in chosen:
            continue
        richest = max(range(len(PARTS)), key=chosen.count)
        groups = [group for group in range(len(chosen)) if chosen[group] == richest]
        chosen[min(groups, key=lambda group: (sizes[group], keys[group]))] = part


def _random_parts(count: int, seed: int) -> dict[str, Indices]:
    if count < len(PARTS):
        raise UsageError(f"{count} pairs cannot be split into training, validation and test")
    order = Permutation(count, mix(seed, 0x5B117)).take(0, count).astype(np.int64)
    first = max(1, min(int(SHARES[0] * count), count - 2))  # of three pairs each part has one
    second = max(1, int(SHARES[1] * count))
    ends = np.split(order, [first, first + second])
    return {name: np.sort(part) for name, part in zip(PARTS, ends, strict=True)}


def _described(parts: dict[str, Indices], antigen_row: NDArray[np.int32], split: str) -> Parts:
    total = sum(map(len, parts.values()))
    num_antigens = {name: len(np.unique(antigen_row[part])) for name, part in parts.items()}
    shown = ", ".join(
        f"{name} {len(part):,} pairs ({100 * len(part) / total:.1f} %) of {num_antigens[name]:,} antigens"
        for name, part in parts.items()
    )
    lines = [f"split by {'antigen' if split == 'antigen' else 'random pairs'}: {shown}"]
    if split == "random":
        lines.append("note: the same antigens are in all parts; scores say nothing about new antigens")
        return Parts(parts, tuple(lines))
    total_antigens = sum(num_antigens.values())
    if total_antigens < _FEW_ANTIGENS:
        lines.append(f"warning: only {total_antigens} antigens; validation and test scores stand for a few of them")
    misses = [abs(len(parts[name]) / total - share) for name, share in zip(PARTS, SHARES, strict=True)]
    if max(misses) > _MAX_MISS:
        largest = np.bincount(antigen_row).max() / total
        lines.append(
            "warning: the parts are not near 70/15/15: an antigen is never divided, and one has "
            f"{100 * largest:.0f} % of the pairs"
        )
    return Parts(parts, tuple(lines))


def _are(count: int) -> str:
    return "is only 1" if count == 1 else f"are only {count}"

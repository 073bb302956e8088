"""Parts of a tensor in several files: boxes, their overlap, their bytes, and what is refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from jackline.checkpoint.format.regions import SHARDED, Region, overlap, parse_parts, runs_of, whole_of


def split(shape: tuple[int, ...], dim: int, ranks: int) -> list[Region]:
    """As torch divides a dimension over ranks; those that get nothing are left out."""
    chunk = -(-shape[dim] // ranks)
    found = []
    for start in range(0, shape[dim], max(1, chunk)):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, min(chunk, shape[dim] - start)
        found.append(Region(tuple(offsets), tuple(sizes)))
    return found


def node_of(shape: tuple[int, ...], regions: list[Region]) -> dict[str, Any]:
    parts = [
        {"file": f"model.rank-{n}", "name": "w", "offsets": list(one.offsets), "shape": list(one.shape)}
        for n, one in enumerate(regions)
    ]
    return {"jackline": SHARDED, "shape": list(shape), "dtype": "float32", "parts": parts}


def test_any_division_can_be_joined_to_any_other() -> None:
    rng = random.Random(4)
    for _ in range(60):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
        whole = np.arange(int(np.prod(shape))).reshape(shape)
        stored = split(shape, rng.randrange(len(shape)), rng.randint(1, 5))
        wanted = split(shape, rng.randrange(len(shape)), rng.randint(1, 5))
        for here in wanted:
            made = np.full(here.shape, -1)
            for part in stored:
                if (both := overlap(here, part)) is not None:
                    values = whole[part.inside(whole_of(shape))]
                    made[both.inside(here)] = values[both.inside(part)]
            assert (made == whole[here.inside(whole_of(shape))]).all()


def test_the_unbroken_pieces_of_a_box_are_its_elements_in_order() -> None:
    rng = random.Random(5)
    for _ in range(60):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
        flat = np.arange(int(np.prod(shape)))
        for region in split(shape, rng.randrange(len(shape)), rng.randint(1, 4)):
            found = list(itertools.chain(*(flat[first : first + count] for first, count in runs_of(region, shape))))
            assert found == flat.reshape(shape)[region.inside(whole_of(shape))].flatten().tolist()
    assert len(list(runs_of(split((8, 3), 0, 2)[1], (8, 3)))) == 1


def test_a_part_that_is_missing_or_elsewhere_is_refused() -> None:
    shape = (10, 6)
    good = split(shape, 0, 2)
    assert parse_parts(node_of(shape, good))[0] == shape
    for regions, words in (
        (good[:1], "do not make up"),
        ([good[0], good[0]], "overlap"),
        ([good[0], Region((6, 0), (5, 6))], "outside"),
        ([Region((0, 0), (10, 6)), Region((0, 0), (-1, 6))], "outside"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_parts(node_of(shape, regions))


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_many_ranks_that_overlap_are_refused(dim: int) -> None:
    """One part twice and one missing: as many elements as the tensor has, and a hole."""
    shape = (300, 300)
    regions = split(shape, dim, 100)
    assert len(parse_parts(node_of(shape, regions))[1]) == 100
    regions[70] = regions[69]
    with pytest.raises(ValueError, match="its parts overlap"):
        parse_parts(node_of(shape, regions))

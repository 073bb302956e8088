"""Parts without a shared antigen, near 70/15/15 however lopsided the table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.errors import UsageError
from jackline.recipes.agab.data.pairs import Hashes
from jackline.recipes.agab.data.split import PARTS, Parts, split_pairs


def antigens(count: int) -> Hashes:
    return np.random.default_rng(count).integers(0, 2**63, (count, 2)).astype(np.uint64)


def split(sizes: list[int], seed: int = 42) -> tuple[Parts, np.ndarray]:
    rows = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return split_pairs(rows, antigens(len(sizes)), "antigen", seed), rows


def shares(parts: Parts) -> list[float]:
    total = sum(map(len, parts.indices.values()))
    return [len(parts.indices[name]) / total for name in PARTS]


@given(st.lists(st.integers(1, 60), min_size=3, max_size=40), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_pair_is_in_one_part_and_no_antigen_in_two(sizes: list[int], seed: int) -> None:
    parts, rows = split(sizes, seed)
    together = np.concatenate([parts.indices[name] for name in PARTS])
    assert sorted(together.tolist()) == list(range(sum(sizes)))
    seen = [set(rows[parts.indices[name]].tolist()) for name in PARTS]
    assert not seen[0] & seen[1] | seen[0] & seen[2] | seen[1] & seen[2]
    assert all(seen)
    assert all((np.diff(parts.indices[name]) > 0).all() for name in PARTS)


@pytest.mark.parametrize(
    "sizes",
    [
        [1] * 400,
        [int(3000 / (rank + 1)) + 1 for rank in range(300)],
        [20_000, 9_000, 4_000, 3_000, *[30] * 500],
        [500, 400, *[20] * 45],
    ],
    ids=["even", "zipf", "few giants", "two giants"],
)
def test_the_shares_are_near_the_wanted_ones(sizes: list[int]) -> None:
    for seed in range(5):
        assert shares(split(sizes, seed)[0]) == pytest.approx([0.70, 0.15, 0.15], abs=0.02)


def test_one_giant_antigen_is_for_training_and_the_miss_is_told() -> None:
    parts, rows = split([9_000, 200, 200, 200, 200, 200])
    assert set(rows[parts.indices["train"]].tolist()) == {0}
    assert parts.lines == (
        "split by antigen: train 9,000 pairs (90.0 %) of 1 antigens, validation 600 pairs (6.0 %) of 3 antigens, "
        "test 400 pairs (4.0 %) of 2 antigens",
        "warning: only 6 antigens; validation and test scores stand for a few of them",
        "warning: the parts are not near 70/15/15: an antigen is never divided, and one has 90 % of the pairs",
    )


def test_the_split_is_a_function_of_seed_and_antigens_only() -> None:
    sizes = list(range(1, 60))
    first, rows = split(sizes, 7)
    again, _ = split(sizes, 7)
    other, _ = split(sizes, 8)
    assert all(np.array_equal(first.indices[name], again.indices[name]) for name in PARTS)
    assert not np.array_equal(first.indices["test"], other.indices["test"])
    # The same antigens under other row numbers fall into the same parts.
    renamed = np.random.default_rng(1).permutation(len(sizes))
    hashes = antigens(len(sizes))
    moved = split_pairs(renamed[rows].astype(np.int32), hashes[np.argsort(renamed)], "antigen", 7)
    assert all(np.array_equal(first.indices[name], moved.indices[name]) for name in PARTS)


def test_too_few_antigens_and_unknown_splits_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        split([5, 5])
    assert str(caught.value) == (
        "error: a split by antigen needs at least 3 antigens, and there are only 2\n"
        "hint: split=random splits the pairs instead; its scores say nothing about new antigens"
    )
    with pytest.raises(UsageError, match="split is 'scaffold'"):
        split_pairs(np.zeros(9, np.int32), antigens(1), "scaffold", 0)


def test_a_random_split_has_the_seeds_counts_and_says_what_it_is_worth() -> None:
    parts = split_pairs(np.zeros(159_735, np.int32), antigens(1), "random", 42)
    assert [len(parts.indices[name]) for name in PARTS] == [111_814, 23_960, 23_961]
    assert len(np.unique(np.concatenate(list(parts.indices.values())))) == 159_735
    assert parts.lines[1] == "note: the same antigens are in all parts; scores say nothing about new antigens"


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 20])
def test_of_few_random_pairs_no_part_is_empty(count: int) -> None:
    rows, hashes = np.zeros(count, np.int32), np.zeros((1, 2), np.uint64)
    parts = split_pairs(rows, hashes, "random", 42).indices
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(count))
    assert all(len(part) for part in parts.values())

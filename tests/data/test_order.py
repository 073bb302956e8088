"""The order: a bijection for every size, uniform, the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.data.loader.order import BLOCK, Blocks, Permutation, mix


def test_every_small_order_is_a_bijection() -> None:
    for n in [*range(1, 200), 1000, 4095, 4096, 4097]:
        order = Permutation(n, mix(7, n)).take(0, n)
        assert np.array_equal(np.sort(order), np.arange(n, dtype=np.uint64)), n


@pytest.mark.parametrize("n", [2**16, 2**16 + 1, 250_000, 2**18 - 1])
def test_large_orders_are_bijections_too(n: int) -> None:
    order = Permutation(n, 3).take(0, n)
    assert np.array_equal(np.sort(order), np.arange(n, dtype=np.uint64))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 2**61), st.integers(0, 2**64 - 1), st.data())
def test_any_stretch_of_any_order_has_no_repetition_and_stays_inside(n: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n - 1))
    count = min(500, n - start)
    found = Permutation(n, key).take(start, count)
    assert len(np.unique(found)) == count
    assert int(found.max()) < n


@pytest.mark.parametrize("n", [2**20 + 1, 2**30 + 1, 10**9])
def test_no_size_has_a_large_domain_to_walk_through(n: int) -> None:
    permutation = Permutation(n, 1)
    domain = int(permutation._left) * int(permutation._right)
    assert domain < n * (1 + 2 / n**0.5)


def test_places_do_not_depend_on_how_they_are_asked_for() -> None:
    permutation = Permutation(300_000, 9)
    whole = permutation.take(0, 300_000)
    blocks = Blocks(permutation)
    assert [int(permutation.take(at, 1)[0]) for at in (0, 65_535, 65_536, 299_999)] == [
        int(whole[at]) for at in (0, 65_535, 65_536, 299_999)
    ]
    for start, count in [(0, 10), (BLOCK - 5, 10), (BLOCK, 3), (2 * BLOCK - 1, 70_000), (299_990, 10)]:
        assert np.array_equal(blocks.take(start, count), whole[start : start + count])


def test_the_order_is_part_of_the_format() -> None:
    # If this changes, every run that is resumed sees other data: never change it, add a new kind of order.
    assert mix(1, 2, 3) == 0xD0734750FDE362B3
    assert Permutation(10, mix(1, 0, 0)).take(0, 10).tolist() == [6, 0, 2, 4, 3, 5, 1, 7, 9, 8]
    assert Permutation(50_000, mix(1, 0, 0)).take(0, 4).tolist() == [7264, 28351, 16642, 7560]
    first = Permutation(10**9, mix(1, 0, 0)).take(0, 4).tolist()
    assert first == [831386645, 811001378, 160076838, 834094973]


@pytest.mark.parametrize("n", [65_535, 1_000_003, 2**30 + 1, 10**9, 10**15])
@pytest.mark.parametrize("apart", [1, 1024])
def test_positions_and_neighbours_are_uniform(n: int, apart: int) -> None:
    bins = 32
    for key in range(5):
        order = Permutation(n, mix(key)).take(0, min(n, 200_000)).astype(float) / n
        one, other = order[:-apart], order[apart:]
        assert abs(np.corrcoef(one, other)[0, 1]) * len(one) ** 0.5 < 4
        for pair in ((one, other), (one, (other - one) % 1)):
            counts = np.histogram2d(*pair, bins=bins, range=[[0, 1], [0, 1]])[0]
            expected = len(one) / bins**2
            assert ((counts - expected) ** 2 / expected).sum() / (bins**2 - 1) < 1.25


@pytest.mark.parametrize("n", [3, 5, 7, 10, 20])
def test_small_orders_are_uniform_over_keys(n: int) -> None:
    orders = np.stack([Permutation(n, mix(key)).take(0, n) for key in range(3000)]).astype(np.int64)
    expected = len(orders) / n
    chi = sum(((np.bincount(orders[:, at], minlength=n) - expected) ** 2 / expected).sum() for at in range(n))
    assert chi / (n - 1) ** 2 < 2.5
    steps = np.bincount((orders[:, 1] - orders[:, 0]) % n, minlength=n)[1:]
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() / max(1, n - 2) < 4.5


def test_seeds_epochs_and_eras_give_different_orders() -> None:
    keys = [mix(seed, epoch, era) for seed in range(3) for epoch in range(3) for era in range(3)]
    orders = {tuple(Permutation(50, key).take(0, 50).tolist()) for key in keys}
    assert len(orders) == 27


def test_a_place_outside_the_order_is_an_error() -> None:
    with pytest.raises(IndexError, match="places 9 to 11 of an order of 10"):
        Permutation(10, 1).take(9, 2)
    with pytest.raises(ValueError, match="cannot permute 0 things"):
        Permutation(0, 1)

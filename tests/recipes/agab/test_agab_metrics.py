"""Rank correlation and its noise: exact with ties, silent where it is not defined, agreeing with plain ways."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jackline.recipes.agab.metrics import average_ranks, compare, interval, measure, spearman


def plain_ranks(values: list[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def plain_pearson(one: list[float], other: list[float]) -> float:
    a, b = [value - sum(one) / len(one) for value in one], [value - sum(other) / len(other) for value in other]
    top = sum(x * y for x, y in zip(a, b, strict=True))
    return top / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


@pytest.mark.parametrize("seed", range(20))
def test_ranks_and_coefficient_are_those_of_the_definition_also_with_many_ties(seed: int) -> None:
    draw = np.random.default_rng(seed)
    made = draw.integers(0, 1 + seed, size=40).astype(float).tolist() if seed else [1.0, 2.0, 2.0, 0.5]
    true = (draw.integers(0, 6, size=len(made)) / 2).tolist()
    assert average_ranks(made).tolist() == plain_ranks(made)
    if len(set(made)) > 1 and len(set(true)) > 1:
        expected = plain_pearson(plain_ranks(made), plain_ranks(true))
        assert spearman(made, true) == pytest.approx(expected, abs=1e-12)


def test_known_values() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1e9]) == 1.0
    assert spearman([4, 3, 2, 1], [1, 2, 3, 4]) == -1.0
    # Four pairs with one tie: 1 - 6 sum(d^2) / (n (n^2 - 1)) does not hold with ties; worked out by hand.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))


def test_all_numbers_of_a_small_set() -> None:
    found = measure([8.0, 9.5, 9.0, 7.0], [8.5, 9.0, 10.0, 6.0])
    assert (found.num_rows, found.num_distinct, found.why) == (4, 4, "")
    assert found.rmse == pytest.approx(math.sqrt((0.25 + 0.25 + 1 + 1) / 4))
    assert found.recall == 1.0
    assert found.spearman == pytest.approx(0.8)
    assert set(found.numbers()) == {"spearman", "pearson", "rmse", "recall_9"}


@pytest.mark.parametrize(
    ("made", "true", "why"),
    [
        ([5.0, 5.0, 5.0], [1.0, 2.0, 3.0], "all predictions are 5"),
        ([1.0, 2.0, 3.0], [7.0, 7.0, 7.0], "all labels are 7"),
        ([1.0, 2.0], [1.0, 2.0], "2 pairs are too few"),
        ([], [], "0 pairs are too few"),
        ([1.0, math.nan, math.inf], [1.0, 2.0, 3.0], "2 of 3 predictions are not finite"),
        ([math.inf, 1.0, math.inf], [1.0, 2.0, 3.0], "2 of 3 predictions are not finite"),
        ([1.0, 2.0, 3.0], [1.0, math.nan, 3.0], "a label is not finite"),
    ],
)
def test_what_is_not_defined_is_said_and_is_never_a_number(made: list[float], true: list[float], why: str) -> None:
    found = measure(made, true)
    assert (found.spearman, found.pearson, found.why) == (None, None, why)
    assert "spearman" not in found.numbers()
    assert compare(made, made, true) is None


def test_without_strong_binders_there_is_no_recall() -> None:
    assert measure([1.0, 2.0, 9.5], [5.0, 6.0, 7.0]).recall is None


def test_predictions_for_another_number_of_pairs_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="3 predictions for 2 pairs"):
        measure([1.0, 2.0, 3.0], [1.0, 2.0])


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draw, hits, rounds = np.random.default_rng(5), 0, 400
    truth = 6 / math.pi * math.asin(0.6 / 2)  # Spearman's of a normal pair with correlation 0.6
    for _ in range(rounds):
        x = draw.normal(size=120)
        y = 0.6 * x + 0.8 * draw.normal(size=120)
        low, high = interval(spearman(x, y), 120) or (2.0, 2.0)
        hits += low <= truth <= high
    assert 0.92 <= hits / rounds <= 0.98


@pytest.mark.parametrize(("coefficient", "rows"), [(None, 100), (0.5, 3), (1.0, 100), (-1.0, 100)])
def test_without_a_basis_there_is_no_interval(coefficient: float | None, rows: int) -> None:
    assert interval(coefficient, rows) is None


def test_the_comparison_tells_a_better_model_and_is_not_fooled_by_noise() -> None:
    draw = np.random.default_rng(3)
    true = np.round(draw.normal(8, 1, 600), 1)
    worse = true + draw.normal(0, 1.5, 600)
    better, alike = true + draw.normal(0, 0.7, 600), worse + draw.normal(0, 0.02, 600)
    found = compare(worse, better, true)
    assert found is not None and found.is_beyond_noise and found.low > 0.1
    back = compare(better, worse, true)
    assert back is not None and not back.is_beyond_noise and back.value == -found.value
    small = compare(worse, alike, true)
    assert small is not None and not small.is_beyond_noise and abs(small.value) < 0.01
    assert compare(worse, better, true) == found  # the same rows are drawn every time


def test_the_comparison_agrees_with_resampling_the_slow_way() -> None:
    draw = np.random.default_rng(4)
    true = np.round(draw.normal(8, 1, 150))
    old, new = np.round(true + draw.normal(0, 1, 150)), true + draw.normal(0, 1, 150)
    gains = []
    for _ in range(2000):
        rows = draw.integers(0, 150, 150)
        gains.append((spearman(new[rows], true[rows]) or 0) - (spearman(old[rows], true[rows]) or 0))
    found = compare(old, new, true)
    assert found is not None
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * float(np.std(gains)), rel=0.15)


def test_the_same_predictions_are_no_gain_at_all() -> None:
    found = compare([1.0, 2.0, 3.5, 4.0], [1.0, 2.0, 3.5, 4.0], [1.0, 3.0, 2.0, 4.0])
    assert found is not None and (found.value, found.is_beyond_noise) == (0.0, False)

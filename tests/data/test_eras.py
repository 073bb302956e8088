"""Eras and windows: arithmetic that must agree with counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackline.data.cache.eras import EraPlan, Place, WindowShape, locate, windows_before
from jackline.errors import UsageError


def test_eras_double_until_they_are_full() -> None:
    plan = EraPlan(4, 32)
    assert [plan.size(era) for era in range(8)] == [4, 4, 8, 16, 32, 32, 32, 32]
    assert [plan.start(era) for era in range(8)] == [0, 4, 8, 16, 32, 64, 96, 128]


def test_rows_are_never_cut_by_an_era() -> None:
    plan = EraPlan(10, 50, 7)
    assert [plan.size(era) % 7 for era in range(8)] == [0] * 8
    assert [plan.start(era) for era in range(5)] == [0, 7, 14, 28, 63]


@given(st.integers(1, 40), st.integers(1, 200), st.integers(2, 30), st.integers(1, 30), st.data())
def test_locating_a_position_is_the_same_as_counting_to_it(
    first: int, more: int, tokens: int, stride: int, data: st.DataObject
) -> None:
    plan, shape = EraPlan(first, first + more), WindowShape(tokens, stride)
    places = [Place(era, i) for era in range(12) for i in range(shape.count_in(plan.size(era)))]
    if not places:
        return
    position = data.draw(st.integers(0, len(places) - 1))
    assert locate(position, plan, shape) == places[position]
    for era in range(12):
        assert windows_before(era, plan, shape) == sum(place.era < era for place in places)


def test_windows_lie_inside_their_era() -> None:
    shape = WindowShape(5, 2)
    for tokens in range(40):
        count = shape.count_in(tokens)
        assert count == len([start for start in range(0, tokens, 2) if start + 5 <= tokens])


def test_a_window_longer_than_every_era_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        locate(0, EraPlan(8, 16), WindowShape(100, 100))
    assert str(caught.value) == (
        "error: a window of 100 tokens is longer than an era of 16 tokens\n"
        "hint: raise era_tokens or shorten the window"
    )


def test_an_era_smaller_than_a_row_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        EraPlan(8, 16, 9)
    assert str(caught.value) == (
        "error: eras of 8 to 16 tokens do not hold rows of 9\n"
        "hint: first_era_tokens must be at least one row and at most era_tokens"
    )

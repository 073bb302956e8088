from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.checkpoint.format.manifest import Name
from jackline.checkpoint.writer.retention import Keep, best_checkpoint, best_to_keep, checkpoints_to_delete
from jackline.errors import UsageError

names = st.sets(st.builds(Name, st.integers(0, 60), st.integers(0, 2)), max_size=20)
keeps = st.builds(Keep, last=st.integers(1, 6), every=st.none() | st.integers(1, 20))


def deleted(steps: list[int], good: list[int] | None = None, best: int | None = None, **keep: int) -> list[int]:
    chosen = checkpoints_to_delete(
        [Name(step) for step in steps],
        good=[Name(step) for step in (steps if good is None else good)],
        keep=Keep(**keep),
        best=[] if best is None else [Name(best)],
    )
    return [name.step for name in chosen]


def test_the_newest_multiples_and_the_best_stay() -> None:
    assert deleted([10, 20, 30, 40, 50, 60], last=2) == [10, 20, 30, 40]
    assert deleted([10, 20, 30, 40, 50, 60], last=2, every=20) == [10, 30]
    assert deleted([10, 20, 30, 40, 50, 60], last=2, best=10) == [20, 30, 40]


def test_two_stay_even_when_one_is_asked_for() -> None:
    assert deleted([1, 2, 3], last=1) == [1]


def test_nothing_goes_before_the_newer_one_was_read_back() -> None:
    assert deleted([1, 2, 3], good=[1, 2], last=2) == []
    assert deleted([1, 2, 3], good=[3], last=2) == []
    assert deleted([1, 2, 3, 4], good=[1, 2, 3], last=2) == [1]


def test_a_damaged_one_goes_once_two_newer_ones_are_good() -> None:
    assert deleted([1, 2, 3, 4], good=[1, 3, 4], last=3) == [2]


@settings(deadline=None)
@given(names, names, keeps, st.none() | st.builds(Name, st.integers(0, 60)))
def test_the_last_two_good_ones_and_all_that_is_newer_never_go(
    present: set[Name], verified: set[Name], keep: Keep, best: Name | None
) -> None:
    gone = set(checkpoints_to_delete(list(present), good=verified, keep=keep, best=[best] if best else []))
    good = sorted(present & verified)
    assert gone <= present
    assert not gone & set(good[-2:])
    assert not gone & set(good[-keep.last :])
    assert best not in gone
    assert len(good) >= 2 or not gone
    assert all(name < good[-2] for name in gone)
    assert not keep.every or all(name.step % keep.every for name in gone)


def test_the_best_is_the_lowest_the_highest_with_a_plus_and_the_oldest_of_equals() -> None:
    metrics = {Name(1): {"loss": 2.0}, Name(2): {"loss": 1.0}, Name(3): {"loss": 1.0}, Name(4): {}}
    assert best_checkpoint(metrics, "loss") == Name(2)
    assert best_checkpoint(metrics, "+loss") == Name(1)
    assert best_checkpoint(metrics, "accuracy") is None
    assert best_checkpoint(metrics, None) is None


def test_a_better_one_that_was_not_read_back_stands_beside_the_best_that_was() -> None:
    metrics = {Name(1): {"loss": 2.0}, Name(2): {"loss": 1.0}, Name(3): {"loss": 3.0}}
    assert best_to_keep(metrics, "loss", good=[Name(1), Name(3)]) == [Name(2), Name(1)]
    assert best_to_keep(metrics, "loss", good=list(metrics)) == [Name(2)]
    assert best_to_keep(metrics, "loss", good=[]) == [Name(2)]
    assert best_to_keep(metrics, None, good=list(metrics)) == []


def test_a_setting_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        Keep(last=0)
    assert str(caught.value) == "error: keep_last = 0 keeps nothing\nhint: 2 or more; two are kept in any case"
    with pytest.raises(UsageError) as caught:
        Keep(every=0)
    assert str(caught.value) == ("error: keep_every = 0 is not a number of steps\nhint: 1 or more, or leave it out")

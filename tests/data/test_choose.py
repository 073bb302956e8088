"""What the builder does next, decided on plain numbers."""

from __future__ import annotations

from typing import Any

from jackline.data.build.choose import Build, Enough, Full, Recycle, View, choose_action
from jackline.data.cache.readers import Reading


def view(**settings: Any) -> View:
    usual: dict[str, Any] = {
        "present": frozenset(),
        "last_era": None,
        "readers": (),
        "eras_ahead": 2,
        "budget_bytes": 1000,
        "era_bytes": lambda era: 100,
        "first_unknown_up_to": lambda era: era,
    }
    return View(**{**usual, **settings})


def test_nobody_reading_means_everything_in_order() -> None:
    assert choose_action(view()) == Build(0)
    assert choose_action(view(present=frozenset({0, 1}))) == Build(2)
    assert choose_action(view(present=frozenset({0, 1, 2}), last_era=2)) == Enough()


def test_preparing_stops_when_the_budget_is_full_and_recycles_nothing() -> None:
    assert choose_action(view(present=frozenset(range(10)))) == Full(10, is_needed_now=False)


def test_the_tokeniser_stays_a_few_eras_ahead_of_the_reader() -> None:
    reader = (Reading(5, repeats=False),)
    assert choose_action(view(readers=reader, present=frozenset({5}))) == Build(6)
    assert choose_action(view(readers=reader, present=frozenset({5, 6, 7}))) == Enough()


def test_what_is_needed_now_is_built_before_what_is_needed_soon() -> None:
    readers = (Reading(0, repeats=False), Reading(50, repeats=False))
    assert choose_action(view(readers=readers, present=frozenset({0, 1}))) == Build(50)


def test_an_era_that_cannot_be_reached_yet_is_built_up_to() -> None:
    found = choose_action(view(readers=(Reading(9, repeats=False),), first_unknown_up_to=lambda era: 4))
    assert found == Build(4)


def test_a_consumed_era_is_recycled_before_a_needed_one() -> None:
    reader = (Reading(7, repeats=False),)
    full = {"readers": reader, "budget_bytes": 300}
    assert choose_action(view(present=frozenset({5, 6, 7}), **full)) == Recycle(5)
    assert choose_action(view(present=frozenset({6, 7}), **full)) == Build(8)


def test_what_will_be_needed_last_goes_first_when_room_is_short() -> None:
    readers = (Reading(0, repeats=False), Reading(50, repeats=False))
    found = choose_action(view(readers=readers, present=frozenset({0, 1, 2}), budget_bytes=300))
    assert found == Recycle(2)


def test_a_budget_that_holds_no_two_readers_is_said() -> None:
    readers = (Reading(0, repeats=False), Reading(50, repeats=False))
    found = choose_action(view(readers=readers, present=frozenset({0}), budget_bytes=100))
    assert found == Full(50, is_needed_now=True)


def test_being_ahead_enough_for_the_budget_is_not_an_error() -> None:
    found = choose_action(view(readers=(Reading(0, repeats=False),), present=frozenset({0, 1}), budget_bytes=200))
    assert found == Full(2, is_needed_now=False)


def test_a_reader_that_repeats_needs_the_first_era_after_the_last() -> None:
    again = (Reading(3, repeats=True),)
    once = (Reading(3, repeats=False),)
    assert choose_action(view(readers=again, present=frozenset({3}), last_era=3)) == Build(0)
    assert choose_action(view(readers=once, present=frozenset({3}), last_era=3)) == Enough()


def test_a_last_era_without_tokens_has_no_file_and_is_not_built_again() -> None:
    reader = (Reading(3, repeats=False),)
    found = choose_action(view(readers=reader, present=frozenset({3}), last_era=4, is_empty_end=True))
    assert found == Enough()

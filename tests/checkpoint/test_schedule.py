from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackline.checkpoint.schedule import (
    MAX_OVERHEAD,
    SHORTEST_S,
    Cadence,
    Progress,
    automatic_interval_s,
    save_is_due,
)
from jackline.errors import UsageError


def at(now_s: float, step: int, **more: object) -> Progress:
    values: dict[str, object] = {"saved_at_s": 0.0, "saved_step": 0, **more}
    return Progress(now_s=now_s, step=step, **values)  # type: ignore[arg-type]


def test_a_save_comes_every_so_many_steps_also_when_steps_are_jumped_over() -> None:
    cadence = Cadence(every_steps=100)
    assert save_is_due(at(0, 99), cadence) is None
    assert save_is_due(at(0, 100), cadence) == "every 100 steps"
    assert save_is_due(at(0, 103), cadence) == "every 100 steps"
    assert save_is_due(at(0, 199, saved_step=103), cadence) is None
    assert save_is_due(at(0, 200, saved_step=103), cadence) == "every 100 steps"


def test_a_save_comes_every_so_many_seconds_of_a_clock_that_never_jumps() -> None:
    cadence = Cadence(every_s=600)
    assert save_is_due(at(599.9, 5), cadence) is None
    assert save_is_due(at(600, 5), cadence) == "every 10 min"


def test_of_both_the_first_counts_and_nothing_new_is_never_saved_again() -> None:
    cadence = Cadence(every_steps=10, every_s=5)
    assert save_is_due(at(6, 1), cadence) == "every 5.0 s"
    assert save_is_due(at(1, 10), cadence) == "every 10 steps"
    assert save_is_due(at(1e9, 10, saved_step=10), cadence) is None


def test_the_first_automatic_save_is_the_early_check_that_saving_works() -> None:
    assert save_is_due(at(29, 3, is_first=True), Cadence()) is None
    assert save_is_due(at(30, 3, is_first=True), Cadence()) == "automatic, 30 s apart"


@settings(deadline=None)
@given(st.floats(0, 1000), st.floats(0, 1000))
def test_automatic_saves_cost_less_than_half_a_percent(stall_s: float, write_s: float) -> None:
    interval_s = automatic_interval_s(at(0, 1, stall_s=stall_s, write_s=write_s))
    assert stall_s <= interval_s * MAX_OVERHEAD * (1 + 1e-9)
    assert interval_s >= SHORTEST_S


def test_a_slow_writer_gets_twice_its_time_but_not_for_ever() -> None:
    assert automatic_interval_s(at(0, 1, write_s=100)) == 200
    assert automatic_interval_s(at(0, 1, write_s=10_000)) == 900


def test_a_distance_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        Cadence(every_steps=0)
    assert str(caught.value) == (
        "error: save_every_steps = 0 is not a distance\nhint: a number above 0, or leave it out"
    )

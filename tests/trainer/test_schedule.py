"""The learning rate as a pure function of the step, and its small picture."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackline.errors import UsageError
from jackline.trainer.optim.schedule import Schedule, describe_schedule, key_points, lr_at, plot_lines, schedule_of


def curve(s: Schedule) -> list[float]:
    return [lr_at(step, s) for step in range(s.total_steps)]


def test_warm_up_rises_evenly_and_reaches_the_rate_at_its_end() -> None:
    s = Schedule("cosine", 1.0, 0.1, warmup_steps=4, total_steps=20)
    assert curve(s)[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_cosine_is_half_way_in_the_middle_and_at_the_floor_at_the_last_step() -> None:
    s = Schedule("cosine", 1.0, 0.1, warmup_steps=0, total_steps=101)
    assert lr_at(0, s) == 1.0
    assert lr_at(50, s) == pytest.approx(0.55)
    assert lr_at(100, s) == 0.1
    assert lr_at(10_000, s) == 0.1


def test_cosine_with_decay_steps_stays_at_the_floor_for_the_rest() -> None:
    s = Schedule("cosine", 1.0, 0.1, warmup_steps=10, total_steps=100, decay_steps=30)
    assert lr_at(39, s) == 0.1 and lr_at(38, s) > 0.1 and lr_at(99, s) == 0.1


def test_constant_never_falls() -> None:
    s = Schedule("constant", 2.0, 0.0, warmup_steps=1, total_steps=4)
    assert curve(s) == [1.0, 2.0, 2.0, 2.0]


def test_wsd_is_stable_and_then_falls_in_a_straight_line() -> None:
    s = Schedule("wsd", 1.0, 0.0, warmup_steps=2, total_steps=20, decay_steps=5)
    assert curve(s)[2:16] == [1.0] * 14
    assert curve(s)[16:] == pytest.approx([0.75, 0.5, 0.25, 0.0])
    assert Schedule("wsd", 1.0, total_steps=100).decay == range(90, 100)


@given(
    st.sampled_from(["cosine", "constant", "wsd"]),
    st.integers(1, 300),
    st.integers(0, 400),
    st.floats(0, 1),
)
def test_the_rate_is_always_between_nothing_and_the_peak_and_falls_once_it_began_to(
    kind: str, total: int, warmup: int, floor: float
) -> None:
    s = Schedule(kind, 1.0, floor, warmup_steps=warmup, total_steps=total)
    values = curve(s)
    assert all(math.isfinite(value) and 0 <= value <= 1.0 for value in values)
    if s.warmup_steps < s.total_steps - 1:
        assert values[s.warmup_steps] == 1.0, "the rate that was asked for is reached"
    rising, falling = values[: s.warmup_steps], values[s.warmup_steps :]
    assert rising == sorted(rising)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(falling))


def test_a_trial_shorter_than_the_warm_up_is_allowed_and_said() -> None:
    s = Schedule("cosine", 3e-4, 3e-5, warmup_steps=2000, total_steps=20)
    assert s.is_warm_up_cut and lr_at(19, s) == pytest.approx(3e-6, rel=0.01)
    text = "cosine: warm-up only: it would take 2,000 steps to 0.0003, the run ends at 3e-06 after 20"
    assert describe_schedule(s) == text
    assert [point.name for point in key_points(s)] == ["first step", "middle", "last step"]


def test_a_schedule_is_told_in_a_sentence() -> None:
    assert (
        describe_schedule(Schedule("cosine", 3e-4, 3e-5, 100, 10_000))
        == "cosine: 100 steps of warm-up to 0.0003, then down to the floor of 3e-05 at step 9,999"
    )
    assert (
        describe_schedule(Schedule("wsd", 3e-4, 0, 100, 10_000))
        == "wsd: 100 steps of warm-up to 0.0003, unchanged to step 9,000, then down to 0 at step 9,999"
    )
    assert describe_schedule(Schedule("constant", 1e-3, total_steps=5)) == "constant: 0.001 from the start"


def test_the_points_a_person_looks_at_are_named() -> None:
    points = key_points(Schedule("wsd", 1.0, 0.0, 10, 100))
    assert [(point.name, point.step) for point in points] == [
        ("first step", 0),
        ("end of warm-up", 10),
        ("middle", 50),
        ("decay begins", 90),
        ("last step", 99),
    ]


def test_the_picture_shows_rise_peak_and_floor() -> None:
    assert plot_lines(Schedule("cosine", 3e-4, 3e-5, 5, 40), width=40, height=4) == [
        " 3.0e-04 |     **********",
        "         |  ***          *********",
        "         | *                      **********",
        " 0.0e+00 |*                                 ******",
        "         +----------------------------------------",
        "          0                                step 39",
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            ("cosin", 1.0),
            "error: schedule is one of cosine, constant, wsd, one-cycle, not 'cosin'\nhint: did you mean 'cosine'?",
        ),
        (("cosine", 0.0), "error: lr=0 is not above 0"),
        (("cosine", float("nan")), "error: lr=nan is not above 0"),
        (("cosine", 1e-3, 1e-2), "error: min_lr=0.01 is not between 0 and lr=0.001\nhint: min_lr=0.0001"),
        (("cosine", 1.0, 0.0, 0, 0), "error: max_steps=0 is not above 0"),
        (("cosine", 1.0, 0.0, -1, 5), "error: warmup_steps and decay_steps cannot be negative"),
        (
            ("wsd", 1.0, 0.0, 6, 10, 5),
            "error: warmup_steps=6 and decay_steps=5 together are more than max_steps=10\nhint: decay_steps=4",
        ),
    ],
)
def test_a_wrong_schedule_is_an_error_with_the_field_in_it(fields: tuple[object, ...], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Schedule(*fields)  # type: ignore[arg-type]
    assert str(caught.value) == text


def test_a_config_is_read_by_its_fields() -> None:
    class Config:
        schedule, lr, min_lr, warmup_steps, decay_steps, max_steps = "wsd", 1e-3, 1e-4, 5, 7, 100
        schedule_start = 0

    assert schedule_of(Config()) == Schedule("wsd", 1e-3, 1e-4, 5, 100, 7)
    assert schedule_of(Config(), total_steps=50).total_steps == 50

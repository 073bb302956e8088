"""When memory will meet its limit: eaters are seen in time, healthy programs are not accused."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jackline.machine.forecast import Point, growth_bytes_per_s, seconds_to_limit

MB = 10**6
GB = 10**9
WINDOW_S = 60.0


def first_warning(used: list[float], limit: int, hz: float = 10.0, soon_s: float = 8.0) -> tuple[float, float] | None:
    """Feed a program's use point by point, as a supervisor does. (when, seconds left as foretold), None if never."""
    points: list[Point] = []
    for number, value in enumerate(used):
        at_s = number / hz
        points = [point for point in points if point[0] > at_s - WINDOW_S] + [(at_s, int(value))]
        left_s = seconds_to_limit(points, limit)
        if left_s is not None and left_s < soon_s:
            return at_s, left_s
    return None


def ramp(start: float, rate_per_s: float, until: float, hz: float = 10.0) -> list[float]:
    steps = int((until - start) / rate_per_s * hz)
    return [start + rate_per_s * number / hz for number in range(steps + 1)]


@pytest.mark.parametrize(
    ("limit", "base", "rate"),
    [
        (1100 * MB, 10 * MB, 200 * MB),
        (2 * GB, 10 * MB, 200 * MB),
        (4 * GB, 10 * MB, 200 * MB),
        (4 * GB, 2 * GB, 200 * MB),
        (16 * GB, 9 * GB, 200 * MB),
        (16 * GB, 12 * GB, 50 * MB),
        (64 * GB, 100 * MB, 3 * GB),
    ],
)
def test_an_eater_is_seen_at_least_two_seconds_before_the_limit(limit: int, base: int, rate: int) -> None:
    quiet = [float(base)] * 100
    warned = first_warning(quiet + ramp(base, rate, limit), limit)
    assert warned is not None
    at_s, foretold_s = warned
    really_left_s = 10.0 + (limit - base) / rate - at_s
    assert really_left_s >= 2.0
    assert foretold_s == pytest.approx(really_left_s, rel=0.1, abs=0.2)


def test_an_eater_is_seen_as_early_when_sampling_was_slow_in_the_beginning() -> None:
    limit, rate = 1200 * MB, 200 * MB
    slow = [(float(second), second * rate) for second in range(4)]
    fast = [(3.1 + number / 10, int((3.1 + number / 10) * rate)) for number in range(25)]
    seen = [fast[count - 1][0] for count in range(1, 25) if seconds_to_limit(slow + fast[:count], limit) is not None]
    assert seen
    assert limit / rate - seen[0] >= 2.0


def test_an_uneven_eater_is_seen_too() -> None:
    random.seed(7)
    used, level = [], 100 * MB
    while level < 4 * GB:
        used.append(float(level))
        level += int(random.expovariate(1 / (20 * MB))) - (15 * MB if random.random() < 0.1 else 0)
    warned = first_warning(used, 4 * GB)
    assert warned is not None
    assert len(used) / 10 - warned[0] >= 2.0


def test_growth_that_gets_faster_is_foretold_by_its_present_rate() -> None:
    slow = ramp(1 * GB, 1 * MB, 1.05 * GB)
    fast = ramp(1.05 * GB, 200 * MB, 4 * GB)
    warned = first_warning(slow + fast, 4 * GB)
    assert warned is not None
    really_left_s = (len(slow) + len(fast)) / 10 - warned[0]
    assert really_left_s >= 2.0
    assert warned[1] == pytest.approx(really_left_s, rel=0.15)


@pytest.mark.parametrize("seconds", [0.2, 0.5, 1, 2, 3, 5, 10, 30])
def test_a_program_that_fills_sixty_percent_at_any_speed_and_stays_is_never_accused(seconds: float) -> None:
    limit = 16 * GB
    loading = ramp(0, 0.6 * limit / seconds, 0.6 * limit)
    assert first_warning(loading + [0.6 * limit] * 300, limit, soon_s=math.inf) is None


def test_a_program_that_loads_its_model_in_waves_is_not_accused() -> None:
    limit = 16 * GB
    used: list[float] = []
    for level in (0.1, 0.2, 0.35, 0.5, 0.6):
        used += ramp(used[-1] if used else 0, 2 * GB, level * limit) + [level * limit] * 30
    assert first_warning(used + [0.6 * limit] * 100, limit, soon_s=math.inf) is None


def test_a_plateau_ends_the_forecast_even_close_to_the_limit() -> None:
    limit = 4 * GB
    eating = ramp(0, 200 * MB, 0.9 * limit)
    points = [(number / 10, int(value)) for number, value in enumerate(eating)]
    assert seconds_to_limit(points, limit) is not None
    end_s = points[-1][0]
    points += [(end_s + number / 10, points[-1][1]) for number in range(1, 80)]
    assert seconds_to_limit(points, limit) is None


def test_saw_teeth_are_not_growth_once_one_has_been_seen() -> None:
    limit = 10 * GB
    tooth = ramp(4 * GB, 500 * MB, 6 * GB)
    assert first_warning(tooth * 20, limit, soon_s=math.inf) is None
    high = ramp(3 * GB, 1000 * MB, 9 * GB) + [3.0 * GB]
    points = [(number / 10, int(value)) for number, value in enumerate(high * 4)]
    later = [seconds_to_limit(points[:count], limit) for count in range(len(high) + 1, len(points))]
    assert set(later) == {None}


def test_a_leak_under_saw_teeth_is_growth() -> None:
    limit = 10 * GB
    used = []
    for number in range(80):  # a step of 1 s takes and gives back 2 GB, and keeps 100 MB
        base = 2 * GB + number * 100 * MB
        used += [base + share * 2 * GB / 8 for share in range(9)] + [float(base)]
    dead = next(number for number, value in enumerate(used) if value >= limit)
    warned = first_warning(used[:dead], limit, soon_s=20)
    assert warned is not None
    assert dead / 10 - warned[0] >= 2.0


def test_two_slow_teeth_are_not_taken_for_a_leak() -> None:
    limit = 10 * GB
    used = ramp(2 * GB, 1 * GB, 6 * GB) + [6 * GB - step * 0.1 * GB for step in range(30)]
    used += ramp(3 * GB, 1 * GB, 8 * GB) + [8 * GB - step * 0.1 * GB for step in range(10)]
    points = [(number / 10, int(value)) for number, value in enumerate(used)]
    assert seconds_to_limit(points, limit) is None


def test_a_gap_in_the_sampling_is_not_growth() -> None:
    points = [(0.0, 1 * GB), (0.1, 1 * GB), (0.2, 1 * GB), (300.0, 9 * GB), (300.1, 9 * GB), (300.2, 9 * GB)]
    assert seconds_to_limit(points, 10 * GB) is None


def test_too_few_points_and_no_limit_say_nothing() -> None:
    assert seconds_to_limit([], GB) is None
    assert seconds_to_limit([(0.0, GB)] * 3, GB) is None
    assert seconds_to_limit([(n / 10, n * 10 * MB) for n in range(50)], 0) is None


def test_the_time_left_is_never_negative() -> None:
    points = [(number / 10, number * 30 * MB) for number in range(50)]
    assert seconds_to_limit(points, GB) == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 2 * GB)), max_size=80),
    st.integers(-1, 2 * GB),
)
def test_any_points_give_an_answer_and_no_error(points: list[Point], limit: int) -> None:
    points = sorted(points)
    left_s = seconds_to_limit(points, limit)
    assert left_s is None or left_s >= 0
    assert math.isfinite(growth_bytes_per_s(points))


def test_growth_is_the_typical_slope_and_not_one_jump() -> None:
    steady = [(number / 10, number * 5 * MB) for number in range(100)]
    assert growth_bytes_per_s(steady) == pytest.approx(50 * MB)
    flat_with_a_jump = [(number / 10, GB if number < 95 else 5 * GB) for number in range(100)]
    assert growth_bytes_per_s(flat_with_a_jump) == 0
    assert growth_bytes_per_s([]) == 0
    assert growth_bytes_per_s([(0.0, 5)]) == 0

"""Every moment of a run is counted once, whatever its history looks like."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from jackline.errors import UsageError
from jackline.review.goodput import MICRO, account, best_saving, goodput_line, use_of
from jackline.review.history import AttemptSpan
from jackline.rundir.records.timeline import TimelineRecord
from jackline.units import parse_price

BEGIN = 1_794_000_000.0


def mark(at_s: float, attempt: int = 1, **more: object) -> TimelineRecord:
    return TimelineRecord(at_s=BEGIN + at_s, attempt=attempt, **{"verdict": "PROGRESS", **more})  # type: ignore[arg-type]


def attempt(number: int, begin_s: float, end_s: float, **more: object) -> AttemptSpan:
    return AttemptSpan(number, BEGIN + begin_s, BEGIN + end_s, **more)  # type: ignore[arg-type]


def test_an_attempt_that_trains_is_start_up_and_then_productive() -> None:
    marks = [mark(5, phase="train", step=0), mark(65, phase="train", step=60)]
    found = account([attempt(1, 0, 65)], marks)
    assert found.seconds() == {"productive": 60.0, "start-up": 5.0}
    assert found.goodput == pytest.approx(60 / 65)


def test_waiting_for_data_and_saving_are_taken_from_the_time_of_steps() -> None:
    marks = [
        mark(0, phase="train", step=0, spent_s={"fetch": 1.0}),
        mark(60, phase="train", step=60, spent_s={"fetch": 13.0, "save": 3.0}),
    ]
    found = account([attempt(1, 0, 60)], marks)
    assert found.seconds() == {"productive": 45.0, "data wait": 12.0, "save stall": 3.0}
    assert best_saving(found) == (
        "data wait cost 20 %: more DataLoader workers, or data downloaded and prepared before the run"
    )


def test_a_run_of_a_moment_gets_no_advice_about_its_time() -> None:
    """A script of 0.1 s was told that start-up cost 90 % of it."""
    found = account([attempt(1, 0, 9)], [mark(8, phase="train", step=0), mark(9, phase="train", step=9)])
    assert found.seconds() == {"productive": 1.0, "start-up": 8.0}
    assert best_saving(found) == ""
    assert goodput_line(found) == ""


def test_steps_that_were_done_before_the_crash_are_redone() -> None:
    marks = [
        mark(0, phase="train", step=0),
        mark(50, phase="train", step=50),
        mark(100, phase="train", step=100),
        mark(110, 2, phase="train", step=80),
        mark(150, 2, phase="train", step=120),
    ]
    found = account([attempt(1, 0, 100), attempt(2, 105, 150)], marks)
    assert found.seconds() == {"productive": 120.0, "start-up": 5.0, "redone": 20.0, "down": 5.0}


def test_bytes_that_were_prepared_are_no_steps_and_preparing_is_start_up() -> None:
    """A recipe's run, as it was recorded: all steps of its second attempt counted as done before."""
    loop = {"phase": "train", "total": 40, "spent_s": {"fetch": 0.0}}
    marks = [
        mark(2, phase="importing torch"),
        mark(5, phase="data: validation data", step=4205600.0),
        mark(7, phase="nano: 4 x 256", step=0.0),
        mark(12, step=1, **loop),
        mark(22, step=11, **loop),
        mark(27, 2, phase="data: validation data", step=4205600.0),
        mark(32, 2, step=11, **loop),
        mark(61, 2, step=40, **loop),
    ]
    found = account([attempt(1, 0, 23), attempt(2, 25, 61)], marks)
    assert found.seconds() == {"productive": 40.0, "start-up": 19.0, "down": 2.0}


def test_the_bars_of_an_epoch_say_nothing_about_what_was_done_before() -> None:
    marks = [
        mark(0, step=0),
        mark(50, step=90, is_part=True),
        mark(60, 2, step=10, is_part=True),
        mark(90, 2, step=50),
    ]
    found = account([attempt(1, 0, 60), attempt(2, 60, 100)], marks)
    assert found.seconds() == {"productive": 100.0}


def test_time_between_attempts_is_stopped_when_a_person_asked_for_it() -> None:
    marks = [mark(0, phase="train", step=0), mark(1000, 2, phase="train", step=10)]
    found = account([attempt(1, 0, 10, is_stopped=True), attempt(2, 1000, 1010)], marks)
    assert found.seconds() == {"productive": 20.0, "stopped": 990.0}
    assert found.goodput == 1.0


def test_a_hang_counts_from_when_nothing_moved_not_from_the_alarm() -> None:
    marks = [
        mark(0, phase="train", step=0),
        mark(60, phase="train", step=50),
        mark(100, phase="train", step=50, verdict="STUCK", still_s=60.0),
        mark(160, phase="train", step=50, verdict="STUCK", still_s=120.0),
    ]
    found = account([attempt(1, 0, 160)], marks)
    assert found.seconds() == {"productive": 40.0, "hang": 120.0}
    assert best_saving(found).startswith("hang cost 75 %")


def test_a_hang_of_many_hours_is_counted_as_quickly_as_a_short_one() -> None:
    """Each minute of a hang has a line, and each says for how long nothing has moved. Going over all time before for
    each of them tripled its pieces: after a quarter of an hour `goodput` and the page never answered."""
    lines = [mark(0, phase="train"), mark(60, phase="train")]
    lines += [mark(120 + 60 * minute, verdict="STUCK", still_s=60.0 * (minute + 1)) for minute in range(2000)]
    found = account([attempt(1, 0, 120 + 60 * 2000)], lines)
    assert found.seconds() == {"productive": 60.0, "hang": 120_060.0}
    assert len(found.spans) < 5000


def test_time_without_a_supervisor_is_said_to_be_unseen() -> None:
    found = account([attempt(1, 0, 1000)], [mark(0, phase="train", step=0)])
    assert found.seconds() == {"productive": 90.0, "unseen": 910.0}
    assert account([attempt(1, 0, 7)], []).seconds() == {"unseen": 7.0}


def test_a_clock_that_was_set_back_takes_nothing_away_and_counts_nothing_twice() -> None:
    found = account([attempt(1, 0, 100), attempt(2, 40, 130)], [])
    assert found.wall_us == 130 * MICRO
    assert found.seconds() == {"unseen": 130.0}


@pytest.mark.parametrize(
    ("line", "use"),
    [
        (mark(0, phase="train"), "productive"),
        (mark(0, phase="validate"), "evaluation"),
        (mark(0, phase="compile the model"), "compile"),
        (mark(0, phase="verify that saving works"), "start-up"),
        (mark(0, phase="wait for room on the disk"), "save stall"),
        (mark(0, what="importing torch"), "start-up"),
        (mark(0, what="waiting for data"), "data wait"),
        (mark(0, what="in the backward pass"), "productive"),
        (mark(0, verdict="PAUSED"), "paused"),
        (mark(0, phase="train", verdict="SUSPECT"), "hang"),
    ],
)
def test_the_use_of_a_phase(line: TimelineRecord, use: str) -> None:
    assert use_of(line) == use


def random_mark(rng: random.Random) -> TimelineRecord:
    return mark(
        rng.uniform(0, 5000),
        rng.randint(1, 4),
        phase=rng.choice([None, "train", "train", "validate", "compile", "start", "data: text", "tiny: 2 x 64"]),
        is_part=rng.choice([None, None, True]),
        what=rng.choice([None, "importing torch", "in the forward pass"]),
        verdict=rng.choice(["PROGRESS", "PROGRESS", "BUSY", "STUCK", "SUSPECT", "PAUSED"]),
        step=rng.choice([None, rng.randint(0, 1000)]),
        still_s=rng.choice([None, rng.uniform(0, 900)]),
        spent_s={name: rng.uniform(-5, 5000) for name in ("fetch", "save") if rng.random() < 0.7},
    )


@pytest.mark.parametrize("seed", range(5))
def test_every_history_adds_up_to_the_wall_time_and_counts_each_second_once(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        attempts = []
        for number in range(1, rng.randint(2, 5)):
            begin = rng.uniform(0, 5000)
            attempts.append(attempt(number, begin, begin + rng.uniform(0, 2000), is_stopped=rng.random() < 0.3))
        marks = sorted(
            (random_mark(rng) for _ in range(rng.randint(0, 30))),
            key=lambda line: (line.attempt or 0, line.at_s or 0),
        )
        found = account(attempts, marks)
        assert sum(found.microseconds().values()) == found.wall_us
        assert all(one.end_us == two.begin_us for one, two in pairwise(found.spans))
        assert found.spans[0].begin_us == round(attempts[0].started_at_s * MICRO)
        assert found.spans[-1].end_us >= max(round(span.ended_at_s * MICRO) for span in attempts)


def test_prices_are_read_and_bad_ones_refused() -> None:
    assert parse_price("3.6/h") == 3.6
    assert parse_price("$3.6") == 3.6
    assert parse_price("0.5 EUR/h") == 0.5
    assert parse_price("86.4/d") == pytest.approx(3.6)
    for bad in ("x", "2.5/week", "-1", "nan", "inf/h", ""):
        with pytest.raises(UsageError):
            parse_price(bad)

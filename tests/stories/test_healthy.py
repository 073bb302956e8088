"""Healthy programs that look idle, slow or hungry at times: no alarm may sound on any of them."""

from __future__ import annotations

import pytest

from tests.expectations import alarms_of, problems_of
from tests.zoo import HEALTHY, Program, Zoo, list_programs

pytestmark = pytest.mark.zoo
ALL = list_programs(HEALTHY)


def test_there_are_enough_healthy_programs() -> None:
    assert len(ALL) >= 20


# A quarter of a minute each, most of it waiting: these are like one of the others to the supervisor.
_ALIKE = {"numpy_sort", "pool_map", "copies_with_cp", "many_short_children", "works_and_sleeps", "prints_in_bursts",
          "hashes_a_data_set", "waits_for_a_batch_job"}  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [pytest.param(each, marks=[pytest.mark.slow] if each.name in _ALIKE or each.is_slow else []) for each in ALL],
    ids=lambda program: program.name,
)
def test_no_alarm_sounds(program: Program, zoo: Zoo) -> None:
    outcome = zoo.outcome(program, pytest.skip)
    assert alarms_of(outcome) == []
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.exit["cause"] == "finished"
    assert problems_of(program, outcome) == []

"""Healthy programs that look idle, slow or hungry at times: no alarm may sound on any of them."""

from __future__ import annotations

import pytest

from tests.expectations import alarms_of, problems_of
from tests.zoo import HEALTHY, Program, Zoo, list_programs

pytestmark = pytest.mark.zoo
ALL = list_programs(HEALTHY)


def test_there_are_enough_healthy_programs() -> None:
    assert len(ALL) >= 20


@pytest.mark.parametrize("program", ALL, ids=lambda program: program.name)
def test_no_alarm_sounds(program: Program, zoo: Zoo) -> None:
    outcome = zoo.outcome(program, pytest.skip)
    assert alarms_of(outcome) == []
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.exit["cause"] == "finished"
    assert problems_of(program, outcome) == []

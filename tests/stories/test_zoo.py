"""Tiny programs that go wrong in a known way: each verdict, cause, file and line must be found out from outside."""

from __future__ import annotations

import pytest

from tests.expectations import problems_of
from tests.zoo import PROGRAMS, Program, Zoo, list_programs

pytestmark = pytest.mark.zoo
ALL = list_programs(PROGRAMS)


def test_the_zoo_is_large_enough() -> None:
    assert len(ALL) >= 32
    assert all(program.expect for program in ALL)


@pytest.mark.parametrize("program", ALL, ids=lambda program: program.name)
def test_what_goes_wrong_is_found_out_and_placed(program: Program, zoo: Zoo) -> None:
    outcome = zoo.outcome(program, pytest.skip)
    problems = problems_of(program, outcome)
    assert not problems, "\n".join([*problems, f"(run directory: {outcome.folder / 'runs' / 'zoo'})"])

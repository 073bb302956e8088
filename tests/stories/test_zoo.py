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


def params(programs: list[Program]) -> list[object]:
    return [pytest.param(one, marks=[pytest.mark.slow] if one.is_slow else []) for one in programs]


@pytest.mark.parametrize("program", params(ALL), ids=lambda program: program.name)
def test_what_goes_wrong_is_found_out_and_placed(program: Program, zoo: Zoo) -> None:
    outcome = zoo.outcome(program, pytest.skip)
    problems = problems_of(program, outcome)
    assert not problems, "\n".join([*problems, f"(run directory: {outcome.folder / 'runs' / 'zoo'})"])


@pytest.mark.parametrize(
    "program", params([one for one in ALL if "cause" in one.expect]), ids=lambda program: program.name
)
def test_a_cause_that_is_called_certain_is_right(program: Program, zoo: Zoo) -> None:
    """'likely' and 'not sure' may be wrong; 'certain' never."""
    findings = zoo.outcome(program, pytest.skip).exit.get("findings") or [{}]
    assert findings[0].get("confidence") in ("certain", "likely", "not sure")
    if findings[0]["confidence"] == "certain":
        assert findings[0]["cause"] in program.words("cause", "|"), findings[0]


def test_enough_ends_are_explained_to_judge_what_certain_is_worth() -> None:
    assert sum("cause" in program.expect for program in ALL) >= 30

"""Saved verdicts of real programs (`jackline why --save-case`) are replayed: each says what a person found right.

To add one, put the file into tests/cases and write what is right into its `expect`: {"kind": ..., "label": ...}.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackline.supervisor.hang.evidence import evidence_lines
from jackline.supervisor.hang.verdict import Judge, case_json, read_case, verdict
from tests.supervisor.worlds import Proc, World, play

CASES = sorted((Path(__file__).parents[1] / "cases").glob("*.json"))


def test_there_are_cases() -> None:
    assert len(CASES) >= 6


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_saved_case_gets_the_verdict_that_is_right(path: Path) -> None:
    raw = json.loads(path.read_text())
    samples, thresholds, said = read_case(raw)
    expect = raw.get("expect") or said
    found = verdict(samples, thresholds)
    assert (found.kind, found.label) == (expect["kind"], expect["label"]), found.text


def test_a_case_survives_the_way_through_a_file() -> None:
    world = World([Proc(7), Proc(8, 7, wait=Proc(1).wait)], tcp=5)
    samples = [world.sample(second) for second in range(3)]
    judge = Judge()
    for sample in samples:
        last = judge.add(sample)
    raw = json.loads(json.dumps(judge.case(last)))
    again, thresholds, said = read_case(raw)
    assert again == samples
    assert verdict(again, thresholds) == last
    assert said["rule"] == last.rule


@pytest.mark.parametrize("raw", [{}, {"format": 2, "samples": []}, {"format": 1, "samples": [{"x": 1}]}])
def test_a_damaged_case_is_refused(raw: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="case"):
        read_case(raw)


def test_the_evidence_names_the_rule_the_measurements_and_what_would_change_it() -> None:
    judge = Judge()
    world = World([Proc(7)])
    for second in range(65):
        last = judge.add(world.sample(second))
        world.live()
    assert (last.kind, last.rule) == ("STUCK", "stuck")
    lines = list(evidence_lines(judge.evidence()))
    assert lines[0] == "rule: stuck"
    assert "nothing at all moved for 1 min 4 s (STUCK at 1 min)" in lines
    assert lines[-1].startswith("what would change its mind: any CPU above 0.02 cores")
    assert next(evidence_lines({})) == "rule: ?"


def test_every_rule_says_what_would_change_its_mind() -> None:
    from jackline.supervisor.hang.rules import MIND_CHANGERS, RULES

    assert {rule.__name__ for rule in RULES} <= set(MIND_CHANGERS)


def test_a_case_is_small() -> None:
    world = World([Proc(7), Proc(8, 7)])
    verdicts = play(world, 1)
    samples = [world.sample(second) for second in range(60)]
    from jackline.supervisor.hang.verdict import Thresholds

    assert len(json.dumps(case_json(samples, Thresholds(), verdicts[-1]))) < 100_000

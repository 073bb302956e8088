"""The rank that the others wait for, and its cause, on hand-made looks at the ranks: no clock, no processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jackline.machine.readings import ProcessReading, Wait
from jackline.supervisor.attempt.stragglers import WINDOW, Habits, Look, Stragglers, find_straggler, habits_of
from tests.supervisor.worlds import Proc, gpu

WAITS = Habits(others=0.7, data=0.0, disk=0.0, queued=0.02, clock=None, slowdown="")
SLOW = replace(WAITS, others=0.0)


def reading(pid: int, kind: str, cpu_s: float, wanted_s: float) -> ProcessReading:
    found = replace(Proc(pid).reading(), cpu_s=cpu_s, wants_cpu_s=wanted_s)
    return replace(found, wait=Wait(kind))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slow", "rest", "words"),
    [
        ({"data": 0.6}, {}, "it waits for its data 60% of the time, the others at most 0%"),
        ({"disk": 0.5, "data": 0.2}, {}, "it waits for a disk 50% of the time, the others at most 0%"),
        ({"queued": 0.55}, {}, "it wants a CPU and others have it 55% of the time, the others at most 2%"),
        (
            {"clock": 0.4, "slowdown": "too hot"},
            {"clock": 0.98},
            "its GPU runs at 40% of its highest clock (too hot), theirs at 98% or more",
        ),
        (
            {"stopped": 0.7},
            {},
            "it is stopped by a signal (SIGSTOP) or a debugger 70% of the time, the others at most 0%",
        ),
        ({}, {}, "it computes all that time, with no more waits for data, disk or CPU than they have"),
    ],
)
def test_the_cause_is_what_the_slow_rank_does_more_than_the_others(
    slow: dict[str, object], rest: dict[str, object], words: str
) -> None:
    others = replace(WAITS, **rest)  # type: ignore[arg-type]
    found = find_straggler({0: others, 1: replace(SLOW, **slow), 2: others})  # type: ignore[arg-type]
    assert found.startswith("rank 1 is the slowest: the others wait for it 70% of the time; ")
    assert words in found


def test_ranks_that_wait_alike_have_no_straggler() -> None:
    assert find_straggler({0: WAITS, 1: WAITS}) == ""
    assert find_straggler({0: SLOW, 1: SLOW}) == ""
    assert find_straggler({0: SLOW, 1: replace(WAITS, others=0.2)}) == ""


def test_a_straggler_is_told_once_after_a_minute_of_looks() -> None:
    stragglers, told = Stragglers(), []
    for second in range(3 * WINDOW):
        kind = "lock" if second % 10 else "running"
        ranks = {0: reading(10, kind, 0.3 * second, 0.3 * second), 1: reading(11, "running", 0.4 * second, second)}
        told.append(stragglers.add(float(second), ranks, (gpu(),)))
    assert [second for second, text in enumerate(told) if text] == [WINDOW - 1]
    assert "rank 1 is the slowest: the others wait for it 90% of the time; it wants a CPU and" in told[WINDOW - 1]


def test_an_evaluation_of_one_rank_is_no_straggler() -> None:
    stragglers = Stragglers()
    for second in range(3 * WINDOW):
        ranks = {0: reading(10, "running", float(second), float(second)), 1: reading(11, "lock", 0.0, 0.0)}
        assert stragglers.add(float(second), ranks, ()) == ""


def test_one_process_has_no_straggler() -> None:
    assert Stragglers().add(0.0, {0: reading(10, "lock", 0.0, 0.0)}, ()) == ""
    assert habits_of([Look("pipe"), Look("running")]).data == 0.5
    assert habits_of([Look("stopped"), Look("running")]).stopped == 0.5

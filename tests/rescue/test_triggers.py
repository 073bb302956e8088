"""When a run is asked for its state without a person: decisions of a supervisor on a clock of the test, and a real
process that answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jackline.rundir.layout import AttemptDir
from jackline.rundir.records.rescue import RescueRecord, write_rescue
from jackline.supervisor.attempt.rescuing import MAX_HOLD_S, Rescuing
from jackline.supervisor.attempt.stopping import Stopping, press
from jackline.supervisor.options import SuperviseOptions
from tests.rescue import matrix


class Told:
    """The events of a supervisor."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def emit(self, event: str, text: str, **facts: Any) -> None:
        self.events.append((event, text))


class Door:
    """This process, as one that has taken an optimizer step: the FIFO at which it is asked, and its answers."""

    def __init__(self, attempt: AttemptDir, pid: int | None = None) -> None:
        self._attempt, self._num_answers = attempt, 0
        self._pid = pid or os.getpid()
        path = attempt.rescue_door(self._pid)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def questions(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in os.read(self.fd, 65536).splitlines()]
        except BlockingIOError:
            return []

    def causes(self) -> list[str]:
        return [question["cause"] for question in self.questions()]

    def answer(self, question: dict[str, Any], stall_s: float = 0.01) -> None:
        record = RescueRecord(question["id"], self._pid, question["cause"], "saved", path="/x", stall_s=stall_s)
        self._num_answers += 1
        write_rescue(self._attempt, replace(record, step=7, is_boundary=True, at_s=1.79e9 + self._num_answers))


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return AttemptDir(tmp_path / "runs/a/attempts/001")


@pytest.fixture
def door(attempt: AttemptDir) -> Iterator[Door]:
    made = Door(attempt)
    yield made
    os.close(made.fd)


def rescuing(attempt: AttemptDir, told: Told, **options: Any) -> Rescuing:
    return Rescuing(attempt, SuperviseOptions(rescue=True, **options), told)  # type: ignore[arg-type]


def look(one: Rescuing, at_s: float, *, is_stuck: bool = False, left_s: float | None = None) -> None:
    one.tend(at_s, is_stuck=is_stuck, memory_left_s=left_s)


def test_a_stuck_verdict_and_memory_that_runs_out_ask_once_each(attempt: AttemptDir, door: Door) -> None:
    one = rescuing(attempt, told := Told())
    for at_s in range(3):
        look(one, at_s, left_s=30.0)
    assert door.causes() == []
    look(one, 3.0, is_stuck=True)
    look(one, 4.0, is_stuck=True)
    (question,) = door.questions()
    assert (question["cause"], question["wait_s"], question["keep"]) == ("stuck", 3.0, False)
    door.answer(question)
    look(one, 5.0, left_s=9.0)
    look(one, 6.0, left_s=5.0)
    (short,) = door.questions()
    assert (short["cause"], short["wait_s"]) == ("memory", 2.0)
    door.answer(short)
    look(one, 7.0, left_s=5.0)
    assert [text.partition(":")[0] for _, text in told.events] == [
        "rescued the state of step 7 because it is stuck",
        "rescued the state of step 7 because host memory is nearly full",
    ]
    assert "load it: jackline rescue a --load" in told.events[0][1]


def test_an_answer_that_comes_while_another_is_told_is_told_at_the_next_look(attempt: AttemptDir, door: Door) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        second = Door(attempt, other.pid)

        class TwoAnswers(Told):
            def emit(self, event: str, text: str, **facts: Any) -> None:
                if not self.events:
                    second.answer(second.questions()[0])
                super().emit(event, text, **facts)

        one = rescuing(attempt, told := TwoAnswers())
        look(one, 0.0, is_stuck=True)
        door.answer(door.questions()[0])
        look(one, 1.0, is_stuck=True)
        assert len(told.events) == 1
        look(one, 2.0, is_stuck=True)
        assert len(told.events) == 2
        os.close(second.fd)
    finally:
        other.kill()
        other.communicate()


def test_memory_that_runs_out_again_and_again_is_no_reason_to_save_again_and_again(
    attempt: AttemptDir, door: Door
) -> None:
    """A forecast that flaps about its limit; a stall of 1.2 s is worth 240 s of training."""
    one = rescuing(attempt, Told())
    look(one, 0.0, left_s=9.0)
    (question,) = door.questions()
    door.answer(question, stall_s=1.2)
    for at_s in range(2, 200, 2):
        look(one, at_s, left_s=9.0 if at_s % 4 else 20.0)
    assert door.causes() == []
    look(one, 243.0, left_s=20.0)
    look(one, 244.0, left_s=9.0)
    assert door.causes() == ["memory"]


def test_rescue_every_ten_minutes_keeps_its_memory_and_waits_longer_after_a_long_stall(
    attempt: AttemptDir, door: Door
) -> None:
    one = rescuing(attempt, told := Told(), rescue_every_s=600.0)
    for at_s in range(0, 600, 10):
        look(one, at_s)
    assert door.causes() == []
    look(one, 600.0)
    (question,) = door.questions()
    assert (question["cause"], question["keep"]) == ("every", True)
    look(one, 610.0)  # not answered: it is not asked again
    assert door.causes() == []
    door.answer(question, stall_s=6.0)  # half a percent of 1,200 s
    for at_s in range(620, 1800, 10):
        look(one, at_s)
    assert door.causes() == []
    look(one, 1800.0)
    assert door.causes() == ["every"] and "load it" not in told.events[0][1]
    look(rescuing(attempt, Told()), 10_000.0)  # without --rescue-every
    assert door.causes() == []


@pytest.mark.parametrize(("why", "cause"), [("time-limit", "time-limit"), ("stop", "stop"), ("sigterm", "stop")])
def test_a_stop_waits_for_the_state_before_the_first_signal(
    why: str, cause: str, attempt: AttemptDir, door: Door
) -> None:
    one = rescuing(attempt, told := Told())
    stopping = Stopping(why, 30.0)
    assert one.holds(stopping, 100.0) and one.holds(stopping, 101.0)
    (question,) = door.questions()
    assert question["cause"] == cause
    door.answer(question)
    assert not one.holds(stopping, 102.0) and len(told.events) == 1
    assert not one.holds(replace(stopping, stage=1), 103.0)


def test_a_stop_does_not_wait_for_ever_nor_after_a_second_press(attempt: AttemptDir, door: Door) -> None:
    one, told = rescuing(attempt, Told()), Told()
    assert one.holds(Stopping("stop", 30.0), 0.0) and not one.holds(Stopping("stop", 30.0), MAX_HOLD_S + 0.1)
    short = rescuing(attempt, told)
    assert short.holds(Stopping("stop", 4.0), 0.0) and not short.holds(
        Stopping("stop", 4.0), 2.1
    )  # half of its grace
    pressed = press(press(None, grace_s=30.0), grace_s=30.0)
    assert not rescuing(attempt, told).holds(pressed, 0.0)
    assert not Rescuing(attempt, SuperviseOptions(rescue=False), told).holds(  # type: ignore[arg-type]
        Stopping("stop", 30.0), 0.0
    )


def test_a_process_that_does_not_answer_is_named_and_one_that_has_gone_is_not_asked(
    attempt: AttemptDir, door: Door
) -> None:
    one = rescuing(attempt, told := Told())
    look(one, 0.0, is_stuck=True)
    look(one, 1000.0, is_stuck=True)
    assert len(door.questions()) == 1
    assert [text for _, text in told.events] == [
        f"no rescue of process {os.getpid()}: it does not answer; a call into C may hold Python's global lock"
    ]
    os.mkfifo(attempt.rescue_door(2**22 - 2))  # nobody has this number
    look(one, 2000.0)
    look(one, 2001.0, left_s=1.0)
    assert len(door.questions()) == 1


def test_a_process_of_pytorch_answers_each_of_these_questions_between_two_steps(tmp_path: Path) -> None:
    """The unchanged script of a stranger, asked in each way by one supervisor."""
    cell = matrix.start("function", tmp_path, "asked")
    one = rescuing(cell.attempt, told := Told(), rescue_every_s=600.0)
    try:
        cell.wait_for("its first steps", (tmp_path / "truth-5.pt").exists)
        look(one, 0.0)
        ways = (
            ("every", lambda at_s: look(one, at_s)),
            ("memory", lambda at_s: look(one, at_s, left_s=5.0)),
            ("time-limit", lambda at_s: one.holds(Stopping("time-limit", 30.0), at_s)),
        )
        for number, (cause, ask) in enumerate(ways, 1):
            at_s = 500.0 + 100.0 * number
            cell.wait_for(cause, lambda ask=ask, at_s=at_s, number=number: (ask(at_s), len(told.events) == number)[1])
            record = cell.record()
            assert (record.cause, record.outcome, record.is_boundary) == (cause, "saved", True), record
            assert matrix.compare(record, tmp_path) == ""
    finally:
        cell.end()

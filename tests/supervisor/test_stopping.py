"""A command is asked, told and made to end, in that order."""

from __future__ import annotations

import signal

from jackline.supervisor.attempt.stopping import Stopping, next_step, press


def steps_over_time(stopping: Stopping, times_s: list[float]) -> list[tuple[float, int, str]]:
    taken = []
    for now_s in times_s:
        stopping, step = next_step(stopping, now_s)
        if step is not None:
            taken.append((now_s, int(step.signal), step.target))
    return taken


def test_a_polite_stop_goes_to_the_main_process_then_the_group_then_kills() -> None:
    seconds = [float(second) for second in range(60)]
    assert steps_over_time(Stopping("stop", grace_s=30.0), seconds) == [
        (0.0, signal.SIGTERM, "main"),
        (30.0, signal.SIGTERM, "group"),
        (35.0, signal.SIGKILL, "tree"),
    ]


def test_each_ctrl_c_goes_one_step_further_and_none_is_taken_by_the_clock() -> None:
    stopping = press(None, grace_s=30.0)
    stopping, first = next_step(stopping, 0.0)
    assert first is not None and (first.signal, first.target) == (signal.SIGINT, "main")
    stopping, waited = next_step(stopping, 1000.0)
    assert waited is None
    stopping, second = next_step(press(stopping, grace_s=30.0), 1001.0)
    assert second is not None and (second.signal, second.target) == (signal.SIGTERM, "group")
    stopping, third = next_step(press(stopping, grace_s=30.0), 1002.0)
    assert third is not None and (third.signal, third.target) == (signal.SIGKILL, "tree")
    assert next_step(press(stopping, grace_s=30.0), 1003.0)[1] is None


def test_ctrl_c_during_a_polite_stop_does_not_wait_for_the_grace() -> None:
    stopping, asked = next_step(Stopping("stop", grace_s=30.0), 0.0)
    assert asked is not None
    stopping, hurried = next_step(press(stopping, grace_s=30.0), 1.0)
    assert hurried is not None and (hurried.signal, hurried.target) == (signal.SIGTERM, "group")

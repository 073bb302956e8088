"""After a death: start again or stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jackline.diagnosis.deaths.evidence import Cause
from jackline.rundir.intent import Intent
from jackline.supervisor.policy import AttemptSummary, Restart, Stop, decide

NETWORK = AttemptSummary(1, 600.0, "network", True)


def deaths(*checkpoints: str | None, **facts: Any) -> list[AttemptSummary]:
    """One death each; every attempt began at the checkpoint the one before left."""
    attempts: list[AttemptSummary] = []
    before: str | None = None
    for number, after in enumerate(checkpoints, start=1):
        has_more = after is not None and after != before
        attempts.append(replace(NETWORK, number=number, made_progress=has_more, **facts))
        before = after
    return attempts


def after(
    attempts: list[AttemptSummary], *, max_restarts: int = 10, is_stop_requested: bool = False, intent: object = None
) -> Restart | Stop:
    """`intent`: the contents of intent.json."""
    wish = Intent.from_json(intent)
    return decide(attempts, max_restarts=max_restarts, is_stop_requested=is_stop_requested, intent=wish)


def test_a_retryable_death_is_followed_by_a_restart_after_five_seconds() -> None:
    assert after([NETWORK]) == Restart(5.0, "restart 1 of 10")


def test_the_delay_doubles_while_nothing_new_is_saved() -> None:
    assert after(deaths(None, None)) == Restart(10.0, "restart 2 of 10")


def test_progress_resets_the_delay() -> None:
    assert after(deaths(None, None, "step-100")) == Restart(5.0, "restart 3 of 10")


def test_three_deaths_without_a_new_checkpoint_are_a_crash_loop() -> None:
    attempts = deaths("step-100", "step-100", "step-100", "step-100")
    assert after(attempts[:3]) == Restart(10.0, "restart 3 of 10")
    assert after(attempts) == Stop("3 deaths in a row without a new checkpoint", is_crash_loop=True)


def test_deaths_that_each_leave_a_new_checkpoint_go_on_until_the_restarts_are_used() -> None:
    attempts = deaths("a", "b", "c", "d")
    assert after(attempts, max_restarts=4) == Restart(5.0, "restart 4 of 4")
    assert after(attempts, max_restarts=3) == Stop("all 3 restarts are used")
    assert after(attempts[:2], max_restarts=1) == Stop("the one restart is used")


def test_the_same_error_twice_within_a_minute_is_a_crash_loop() -> None:
    attempts = deaths(None, None, duration_s=59.0, traceback_hash="abc")
    assert after(attempts) == Stop(
        "the same error ended two attempts within a minute of their start", is_crash_loop=True
    )


@pytest.mark.parametrize(
    "second",
    [{"traceback_hash": "other"}, {"duration_s": 61.0}, {"traceback_hash": ""}],
    ids=["another error", "a longer life", "no traceback"],
)
def test_two_deaths_that_differ_are_not_yet_a_loop(second: dict[str, Any]) -> None:
    attempts = deaths(None, None, duration_s=59.0, traceback_hash="abc")
    assert isinstance(after([attempts[0], replace(attempts[1], **second)]), Restart)


def test_two_attempts_without_any_traceback_are_not_the_same_error() -> None:
    assert isinstance(after(deaths(None, None, duration_s=1.0)), Restart)


@pytest.mark.parametrize("cause", ["segfault", "abort", "bus_error"])
def test_a_crash_is_retried_once(cause: Cause) -> None:
    attempts = deaths(None, None, cause=cause)
    assert isinstance(after(attempts[:1]), Restart)
    assert after(attempts) == Stop(
        f"it ended by {cause.replace('_', ' ')} again; that is retried once", is_crash_loop=True
    )


def test_a_crash_after_progress_is_retried_again() -> None:
    assert isinstance(after(deaths(None, "step-100", cause="segfault")), Restart)


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        ("finished", "it is finished"),
        ("stopped", "it was stopped"),
        ("killed_by_someone", "it was stopped on purpose"),
        ("time_limit", "the time limit was reached"),
        ("kernel_oom", "the same command would run out of memory again"),
        ("cuda_oom", "the same command would run out of GPU memory again"),
        ("disk_full", "the disk is still full"),
        ("own_exception", "the same command would most likely fail the same way"),
    ],
)
def test_causes_that_are_not_retried_say_why(cause: Cause, why: str) -> None:
    assert after([replace(NETWORK, cause=cause, is_retryable=False)]) == Stop(why)


def test_without_restarts_a_retryable_death_is_the_end() -> None:
    assert after([NETWORK], max_restarts=0) == Stop("restarts are off; --restart N turns them on")


def test_a_requested_stop_wins_over_everything() -> None:
    assert after([NETWORK], is_stop_requested=True, intent={"restart": True}) == Stop("a stop was requested")


@pytest.mark.parametrize("cause", ["killed_by_someone", "time_limit"])
def test_a_persons_kill_wins_over_what_the_session_wants(cause: Cause) -> None:
    decision = after([replace(NETWORK, cause=cause)], intent={"restart": True, "why": "smaller batch"})
    assert isinstance(decision, Stop)


def test_the_session_may_ask_for_a_restart_of_what_is_not_retried_even_without_restarts() -> None:
    attempt = replace(NETWORK, cause="cuda_oom", is_retryable=False)
    intent = {"restart": True, "why": "micro-batch 16 -> 8", "settings": {"micro_batch": 8}}
    decision = after([attempt], intent=intent, max_restarts=0)
    assert decision == Restart(0.0, "micro-batch 16 -> 8; next with micro_batch=8")


def test_what_we_ended_for_memory_continues_even_without_restarts_but_not_for_ever() -> None:
    guarded = replace(NETWORK, cause="memory_guard", is_retryable=False)
    decision = after([guarded, guarded], max_restarts=0)
    assert decision == Restart(
        0.0, "resuming from the last checkpoint, with fewer workers where they are Jackline's to choose"
    )
    assert after([guarded] * 3, max_restarts=0) == Stop(
        "it filled the host's memory 3 times without a new checkpoint", is_crash_loop=True
    )


def test_the_session_may_refuse_a_restart() -> None:
    assert after([NETWORK], intent={"restart": False, "why": "the loss is NaN"}) == Stop("the loss is NaN")
    assert after([NETWORK], intent={"restart": False}) == Stop("the script asked not to be started again")


def test_a_session_that_asks_for_ever_without_progress_is_a_crash_loop() -> None:
    attempts = deaths(*[None] * 10, cause="cuda_oom", is_retryable=False)
    assert isinstance(after(attempts[:9], intent={"restart": True}), Restart)
    assert after(attempts, intent={"restart": True}) == Stop(
        "the script asked for 10 restarts without a new checkpoint", is_crash_loop=True
    )


def test_a_finished_run_is_not_started_again_even_when_asked() -> None:
    finished = replace(NETWORK, cause="finished", is_retryable=False)
    assert after([finished], intent={"restart": True}) == Stop("it is finished")


@pytest.mark.parametrize("intent", [{}, {"restart": "yes"}, {"why": "x"}, {"restart": None, "why": 3}])
def test_a_damaged_intent_is_no_intent(intent: dict[str, Any]) -> None:
    assert after([NETWORK], intent=intent) == Restart(5.0, "restart 1 of 10")


def test_the_delay_never_exceeds_five_minutes() -> None:
    from jackline.supervisor.policy import _delay_s

    assert _delay_s(deaths(*[None] * 7)) == 300.0
    assert _delay_s(deaths(*[None] * 5000)) == 300.0

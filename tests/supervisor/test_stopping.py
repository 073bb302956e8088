"""A command is asked, told and made to end, in that order."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from jackline.machine.host import SessionEnd
from jackline.machine.readings import TreeReading
from jackline.rundir.records.supervisor import TimeLimitRecord
from jackline.supervisor.attempt import stopping
from jackline.supervisor.attempt.stopping import (
    Asked,
    Clocks,
    LimitWatch,
    Stopping,
    StuckWatch,
    TimeLimit,
    choose_limit,
    heed_warning,
    next_step,
    press,
)
from jackline.supervisor.hang.scene import Verdict
from jackline.supervisor.options import SuperviseOptions
from tests.supervisor.worlds import Proc


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


NOW = Clocks(steady_s=100.0, at_s=50_000.0)


def chosen(given_s: float | None, session: SessionEnd | None, **more: bool) -> TimeLimit | None:
    return choose_limit(given_s, session, grace_s=30.0, is_mirrored=more.get("is_mirrored", False), now=NOW)


def slurm(left_s: float) -> SessionEnd:
    return SessionEnd("Slurm", NOW.at_s + left_s, is_firm=True, is_told=True)


def test_a_job_is_stopped_some_time_before_its_end_so_that_it_can_save() -> None:
    assert chosen(None, None) is None
    assert chosen(None, slurm(36000.0)) == TimeLimit("Slurm", 36100.0, 36100.0 - 120.0, is_told=True)
    assert chosen(None, slurm(36000.0), is_mirrored=True) == TimeLimit(
        "Slurm", 36100.0, 36100.0 - 300.0, is_told=True
    )
    # A short job is not spent waiting for its end.
    assert chosen(None, slurm(600.0)) == TimeLimit("Slurm", 700.0, 640.0, is_told=True)
    assert chosen(None, slurm(10.0)) == TimeLimit("Slurm", 110.0, 105.0, is_told=True)


def test_a_given_limit_replaces_what_is_only_published_but_not_what_was_told() -> None:
    given = TimeLimit("given", 3700.0, 3700.0)
    kaggle = SessionEnd("Kaggle", NOW.at_s + 1000.0, is_firm=True)
    colab = SessionEnd("Colab", NOW.at_s + 1000.0, is_firm=False)
    assert chosen(3600.0, None) == chosen(3600.0, kaggle) == chosen(3600.0, slurm(36000.0)) == given
    assert chosen(3600.0, slurm(3600.0)) == TimeLimit("Slurm", 3700.0, 3580.0, is_told=True)
    assert chosen(None, kaggle) == TimeLimit("Kaggle", 1100.0, 1000.0)
    assert chosen(None, colab) == TimeLimit("Colab", 1100.0, None)


def test_a_supervisor_that_takes_over_keeps_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    first = LimitWatch(SuperviseOptions(time_limit_s=5000.0))
    left = first.record()
    assert left.source == "given" and left.stops_at_s is not None
    second = LimitWatch(SuperviseOptions(time_limit_s=5000.0))
    second.recall(TimeLimitRecord("given", left.stops_at_s - 4000.0, left.stops_at_s - 4000.0))
    assert first.limit is not None and second.limit is not None and first.limit.stops_s is not None
    assert second.limit.stops_s == pytest.approx(first.limit.stops_s - 4000.0, abs=0.2)
    assert second.reached(second.limit.ends_s) == "the time limit of 1 h 23 min is reached"
    assert second.reached(second.limit.ends_s - 1.0) == ""
    second.recall(TimeLimitRecord())  # written by an older version
    assert second.limit is not None


# -- a run that is stuck -------------------------------------------------------------------------------------------

RANKS = Verdict("STUCK", "STUCK_RANKS", 100.0, "rank 1 has not arrived", rule="collective")
BY_DEFAULT = SuperviseOptions(on_stuck_ranks="restart")


def actions(verdict: Verdict | None, options: SuperviseOptions, times_s: list[float]) -> list[str]:
    watch = StuckWatch()
    return [watch.judge(verdict, options, now_s)[0] for now_s in times_s]


def test_a_collective_that_hangs_is_ended_though_nobody_has_asked_for_it() -> None:
    assert actions(RANKS, BY_DEFAULT, [125.0, 200.0, 279.0, 280.0]) == ["report", "report", "report", "restart"]
    watch = StuckWatch()
    told = [watch.judge(RANKS, BY_DEFAULT, now_s)[1] for now_s in (125.0, 126.0)]
    assert told == [
        "if no rank moves, the job is ended in 2 min 35 s (torch would wait for its own timeout); "
        "`--on-stuck report` forbids it",
        "",
    ]


def test_a_collective_that_can_never_complete_is_ended_at_once() -> None:
    assert actions(replace(RANKS, is_final=True), BY_DEFAULT, [121.0]) == ["restart"]


def test_nothing_is_ended_that_may_continue_or_that_the_user_wants_to_keep() -> None:
    alone = replace(RANKS, label="STUCK_LOCK", rule="stuck")
    suspect = replace(RANKS, kind="SUSPECT")
    for verdict in (None, alone, suspect):
        assert actions(verdict, BY_DEFAULT, [125.0, 9000.0]) == ["report", "report"]
    assert actions(RANKS, SuperviseOptions(), [9000.0]) == ["report"]
    assert actions(alone, SuperviseOptions(on_stuck="stop"), [125.0]) == ["stop"]


# -- Slurm's warning -----------------------------------------------------------------------------------------------


def test_a_program_that_handles_slurms_warning_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {5: "caught", 6: "default", 7: "caught"}
    monkeypatch.setattr(stopping, "signal_answer", lambda pid, number: answers[pid])
    launcher, plain, own = Proc(5, comm="pt_elastic"), Proc(6), Proc(7)
    tree = TreeReading(0.0, (launcher.reading(), plain.reading()))
    assert heed_warning(tree, 30.0)[0] == Stopping("sigterm", 30.0)
    asked, text = heed_warning(TreeReading(0.0, (*tree.processes, own.reading())), 30.0)
    assert asked is None
    assert text == "SIGUSR1, Slurm's warning before a time limit: process 7 (python) handles it itself"
    answers.update({6: "unknown", 7: "unknown"})  # it was quicker
    assert heed_warning(TreeReading(0.0, (plain.reading(), own.reading())), 30.0)[0] is None


def test_a_program_that_ends_after_its_handler_is_not_taken_for_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes its handlers away before it ends."""
    answers = {6: "default"}
    monkeypatch.setattr(stopping, "signal_answer", lambda pid, number: answers[pid])
    tree = TreeReading(0.0, (Proc(6).reading(),))
    ending, staying = Asked(), Asked()
    assert ending.heed(tree, 30.0, 99.0) is None  # nobody warned
    ending.is_warned = staying.is_warned = True
    assert ending.heed(tree, 30.0, 100.0) is None
    assert staying.heed(tree, 30.0, 100.0) is None
    found = staying.heed(tree, 30.0, 101.0)
    assert found is not None
    assert found[0] == Stopping("sigterm", 30.0)
    answers[6] = "unknown"
    found = ending.heed(tree, 30.0, 101.0)
    assert found is not None
    assert found[0] is None
    assert ending.heed(tree, 30.0, 102.0) is None  # told once

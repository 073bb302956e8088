"""Main threads that wait for threads which sleep, poll or hand something on: when that is an alarm, and when not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jackline.diagnosis.frames import Frame, ThreadStack
from jackline.machine.readings import Wait
from jackline.rundir.layout import RunDir
from jackline.supervisor.attempt.hang_watch import HangWatch
from jackline.supervisor.events import Events
from jackline.supervisor.hang.scene import Thresholds
from jackline.supervisor.hang.verdict import Judge, Sample, Verdict
from jackline.supervisor.options import SuperviseOptions
from jackline.supervisor.output.log_writer import LogWriter
from tests.supervisor.hanging import SLEEP_LOOP, hanging, wait_until
from tests.supervisor.worlds import Proc, World, alarms, first

THREADING = "/usr/lib/python3.11/threading.py"
JOIN = (
    Frame("_wait_for_tstate_lock", THREADING, 1132),
    Frame("join", THREADING, 1112),
)
EVENT = (Frame("wait", THREADING, 327), Frame("wait", THREADING, 629))
LOCK = Wait("lock", is_endless=True)
AT_LOCK, ASLEEP = ("with account:", "lock", True), ("time.sleep(90)", "sleep", False)


def thread(tid: int, where: tuple[str, str, bool]) -> ThreadStack:
    source, wait, is_endless = where
    frames = (Frame("job", "/me/p7.py", tid, source, is_user=True),)
    return ThreadStack(tid, f"job-{tid}", frames, wait=wait, is_endless=is_endless)


def watch(leader: Proc, seconds: int, ran_ns: Callable[[int, int], int]) -> list[Verdict]:
    """`ran_ns(tid, second)`: how long a thread has been on a CPU until then."""
    judge, world, verdicts = Judge(), World([leader]), []
    for second in range(seconds):
        sample: Sample = world.sample(second)
        threads = ((7, 0), *((one.thread_id, ran_ns(one.thread_id, second)) for one in leader.threads))
        runs = tuple(on_cpu_ns // 50_000 for _, on_cpu_ns in threads)  # each run costs 0.05 ms
        one = replace(sample.tree.processes[0], threads=threads, thread_runs=runs)
        verdicts.append(judge.add(replace(sample, tree=replace(sample.tree, processes=(one,)))))
        world.live()
    return verdicts


def lives(program: Proc, *, seconds: int, spans_s: float, has_timer: bool = False) -> list[Verdict]:
    """A main thread whose calls end by themselves after `spans_s`, again and again, and do nothing but begin anew.
    With `has_timer`, it waits without a limit beside a thread that does so, each time another one."""
    judge, world, verdicts = Judge(), World([program]), []
    for second in range(seconds):
        num_calls = int(second // spans_s)
        ends_s = 1000.0 + (num_calls + 1) * spans_s
        if has_timer:
            timer = ThreadStack(20 + num_calls, "Timer", EVENT, wait="lock", until_s=ends_s)
            program.threads = (timer,)
            threads = ((7, 0), (timer.thread_id, 50_000))
        else:
            program.wait = replace(program.wait, until_s=ends_s)
            threads = ((7, 50_000 * num_calls),)
        sample = world.sample(second)
        one = replace(sample.tree.processes[0], threads=threads, thread_runs=tuple(1 for _ in threads))
        verdicts.append(judge.add(replace(sample, tree=replace(sample.tree, processes=(one,)))))
        world.live()
    return verdicts


def test_a_main_thread_that_waits_45_s_at_a_time_may_do_so_ten_times() -> None:
    for wait in (Wait("sleep"), Wait("lock"), Wait("network", "listening on 0.0.0.0:80")):
        verdicts = lives(Proc(7, wait=wait, inside=EVENT), seconds=600, spans_s=45)
        assert first(verdicts, "STUCK") == -1
        assert first(verdicts, "SUSPECT") in (450, 480)


def test_a_sleep_for_an_hour_is_not_planned() -> None:
    assert first(lives(Proc(7, wait=Wait("lock"), inside=EVENT), seconds=70, spans_s=4000), "STUCK") == 60


def test_timers_that_start_one_another_are_no_alarm_for_ten_minutes() -> None:
    leader = Proc(7, wait=LOCK, inside=EVENT)
    verdicts = lives(leader, seconds=700, spans_s=40, has_timer=True)
    assert first(verdicts, "STUCK") == -1
    assert first(verdicts, "SUSPECT") >= 600


def test_a_child_that_sleeps_is_awaited_until_it_has_slept() -> None:
    asleep = Proc(8, 7, "sleep", wait=Wait("sleep", lasts_s=250.0), is_python=False)
    for kind in ("child", "pipe", "file_lock"):
        world = World([Proc(7, wait=Wait(kind, is_endless=True)), asleep])  # type: ignore[arg-type]
        judge, verdicts = Judge(), []
        for second in range(300):
            sample = world.sample(second)
            processes = tuple(
                replace(one, threads=((one.pid, 0),), thread_runs=(1,)) for one in sample.tree.processes
            )
            verdicts.append(judge.add(replace(sample, tree=replace(sample.tree, processes=processes))))
            world.live()
        assert alarms(verdicts[:255]) == []
        assert first(verdicts, "STUCK") == 260


def test_a_sleep_says_when_it_ends() -> None:
    verdicts = lives(Proc(7, wait=Wait("sleep")), seconds=20, spans_s=300.0)
    assert verdicts[-1].kind == "WAITING"
    assert (
        "; nothing has moved for 19 s; that ends by itself in 4 min 41 s; if nothing changes, " in verdicts[-1].text
    )


def test_a_server_without_clients_is_not_stuck() -> None:
    leader = Proc(7, wait=Wait("network", "listening on 0.0.0.0:80", lasts_s=0.5))
    verdicts = watch(leader, 900, never)
    assert first(verdicts, "STUCK") == -1


def never(_tid: int, _second: int) -> int:
    return 0


def test_a_long_sleep_of_a_thread_that_holds_the_lock_is_judged_like_one_of_the_main_thread() -> None:
    for inside in (JOIN, EVENT):
        threads = (thread(9, ASLEEP), thread(11, AT_LOCK))
        verdicts = watch(Proc(7, wait=LOCK, inside=inside, threads=threads), 130, never)
        assert first(verdicts, "STUCK") == -1
        assert first(verdicts, "SUSPECT") == 120


def test_without_a_sleeper_the_same_wait_is_stuck_at_the_limit() -> None:
    leader = Proc(7, wait=LOCK, inside=JOIN, threads=(thread(9, AT_LOCK), thread(11, AT_LOCK)))
    assert first(watch(leader, 70, never), "STUCK") == 60


def test_a_heartbeat_that_sleeps_again_and_again_does_not_hide_a_hang() -> None:
    def beats(_tid: int, second: int) -> int:
        return 50_000 * second

    leader = Proc(7, wait=LOCK, inside=EVENT, threads=(thread(9, ASLEEP),))
    assert first(watch(leader, 70, beats), "STUCK") == 60
    beside = Proc(7, wait=LOCK, inside=JOIN, threads=(thread(9, ASLEEP), thread(11, AT_LOCK)))
    assert first(watch(beside, 70, lambda tid, second: beats(tid, second) if tid == 9 else 0), "STUCK") == 60


def test_joined_threads_that_all_poll_are_judged_like_a_polling_main_thread() -> None:
    leader = Proc(7, wait=LOCK, inside=JOIN, threads=(thread(9, ASLEEP), thread(11, ASLEEP)))
    verdicts = watch(leader, 250, lambda _tid, second: 50_000 * second)
    assert first(verdicts, "STUCK") == -1
    assert alarms(verdicts) in ([], ["SUSPECT STUCK_LOCK"])
    assert first(verdicts[:240], "SUSPECT") == -1


def test_threads_that_hand_a_lock_on_are_no_alarm_however_long_it_takes() -> None:
    def every_20_s(tid: int, second: int) -> int:
        return 50_000 * ((second + tid) // 20)

    leader = Proc(7, wait=LOCK, inside=JOIN, threads=(thread(9, AT_LOCK), thread(11, AT_LOCK)))
    assert alarms(watch(leader, 900, every_20_s)) == []


def test_a_question_is_asked_right_after_a_sample_and_its_answer_ends_the_time_that_does_not_count(
    tmp_path: Path,
) -> None:
    """What a process does between a question and the next sample counts as caused by us: that time must be short."""
    run = RunDir(tmp_path / "run")
    attempt = run.attempt(1)
    attempt.stacks.mkdir(parents=True)
    options = SuperviseOptions(quiet_after_s=0.0, stuck_after_s=3.0)
    with hanging(tmp_path, SLEEP_LOOP, waits="sleep") as program:
        watch = HangWatch(attempt, options, Events(run, LogWriter(run.out_log), None))
        world = World([Proc(program.pid, wait=Wait("lock"))])
        for second in range(3):  # it stands still
            sample = watch.make_sample(world.at_s, 0.0, world.sample(second).tree, (), (0, 0))
            watch.judge_sample(sample)
            world.live()
        watch.ask(world.at_s - 0.5, [program.pid])
        assert not watch.sampler.is_busy, "half a second after the sample is too late"
        watch.ask(world.at_s - 1.0, [program.pid])
        assert watch.sampler.is_busy
        assert not watch.is_sample_due

        def is_answered() -> bool:
            return watch.collect(world.sample(0).tree) is not None

        wait_until(is_answered, "the answer")
        assert watch.is_sample_due
        sample = watch.make_sample(world.at_s, 0.0, world.sample(3).tree, (), (0, 0))
        assert sample.disturbed == {program.pid}
        assert not watch.is_sample_due


def a_child_that_naps(
    spans_s: float, limits: Thresholds, seconds: int, disturbed: frozenset[int] = frozenset()
) -> list[Verdict]:
    """The main thread waits for the end of a program that sleeps again and again and does little in between. The
    processes `disturbed` were held by our own looks at them, in every sample."""
    child = Proc(11, ppid=7, wait=Wait("sleep"), source="time.sleep(4)")
    judge, world, verdicts = Judge(limits), World([Proc(7, wait=Wait("child", "process 11")), child]), []
    for second in range(seconds):
        num_naps = int(second // spans_s)
        child.wait = replace(child.wait, until_s=1000.0 + (num_naps + 1) * spans_s)
        sample = world.sample(second)
        parent, napping = sample.tree.processes
        napping = replace(napping, threads=((11, 50_000 * num_naps),), thread_runs=(num_naps,))
        tree = replace(sample.tree, processes=(parent, napping))
        verdicts.append(judge.add(replace(sample, tree=tree, disturbed=disturbed)))
        world.live()
    return verdicts


def test_a_child_that_is_awaited_may_sleep_ten_times_in_vain() -> None:
    """20 ms of work in a hundred are less than a sample sees on a busy machine."""
    short = Thresholds(stuck_after_s=6.0, suspect_after_s=6.0)
    assert alarms(a_child_that_naps(4.0, short, 40)) == []
    assert alarms(a_child_that_naps(4.0, short, 200))
    assert alarms(a_child_that_naps(4.0, short, 40, frozenset({11}))) == []
    assert alarms(a_child_that_naps(55.0, Thresholds(), 500)) == []
    assert alarms(a_child_that_naps(55.0, Thresholds(), 2_000))

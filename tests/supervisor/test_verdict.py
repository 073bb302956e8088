"""Every rule of the verdict on hand-made trees with a clock of their own, and some real programs at the end."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from jackline.diagnosis.frames import Frame, ThreadStack
from jackline.machine.proc import read_tree
from jackline.machine.readings import GpuProcess, ProcessReading, Wait, WaitKind
from jackline.supervisor.hang.verdict import Judge, Sample, Thresholds, Verdict, verdict
from jackline.supervisor.stacks.take import sample_stacks
from tests.deadline import HANGS_S
from tests.supervisor.hanging import (
    FORK_DEADLOCK,
    GIL_IN_C,
    LOCK_ABBA,
    NOISY_LOGGER,
    REGEX,
    SLEEP_LOOP,
    SOCKET_RECV,
    STOPPED_WORKER,
    hanging,
)
from tests.supervisor.worlds import Proc, World, alarms, first, gpu, play

# -- stuck ----------------------------------------------------------------------------------------------------------


def test_nothing_that_moves_for_a_minute_is_stuck_and_not_before() -> None:
    verdicts = play(World([Proc(7)]), 70)
    assert first(verdicts, "STUCK") == 60
    assert first(verdicts, "SUSPECT") == -1
    last = verdicts[-1]
    assert last == Verdict(
        "STUCK",
        "STUCK_LOCK",
        1000.0,
        "nothing has moved for 1 min 9 s: the main thread (pid 7) is waiting for a lock at /me/p7.py:10 `with lock:`",
        Frame("work", "/me/p7.py", 10, "with lock:", True),
        7,
    )


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("lock", "STUCK_LOCK"),
        ("file_lock", "STUCK_LOCK"),
        ("network", "STUCK_NET"),
        ("child", "STUCK_CHILD"),
        ("pipe", "STUCK"),
        ("local_socket", "STUCK"),
        ("poll", "STUCK"),
        ("file", "STUCK"),
        ("unknown", "STUCK"),
    ],
)
def test_the_label_comes_from_what_the_main_thread_waits_on(kind: WaitKind, label: str) -> None:
    assert alarms(play(World([Proc(7, wait=Wait(kind))]), 70)) == [f"STUCK {label}"]


@pytest.mark.parametrize("kind", ["child", "pipe", "local_socket", "poll", "sleep"])
def test_a_wait_with_workers_is_a_wait_for_them_and_their_lines_are_named(kind: WaitKind) -> None:
    world = World([Proc(7, wait=Wait(kind)), Proc(8, 7, line=9, source="event.wait()")])
    last = play(world, 70)[-1]
    assert (last.kind, last.label, last.pid) == ("STUCK", "STUCK_CHILD", 8)
    assert "; process 8 (python) is waiting for a lock at /me/p8.py:9 `event.wait()`" in last.text
    assert last.frame is not None and last.frame.file == "/me/p7.py"


def test_workers_at_the_same_line_are_told_together_and_the_odd_one_apart() -> None:
    workers = [Proc(pid, 7, wait=Wait("pipe")) for pid in range(10, 16)]
    for worker in workers:
        worker.is_python = False
        worker.comm = "loader"
    text = play(World([Proc(7, wait=Wait("poll")), *workers, Proc(20, 7)]), 70)[-1].text
    assert "; 6 processes (10, 11, 12, 13, ...) are waiting on a pipe; process 20 (python) is waiting" in text


@pytest.mark.parametrize(
    "file",
    ["/usr/lib/python3.11/multiprocessing/queues.py", "/v/site-packages/torch/distributed/distributed_c10d.py"],
)
def test_a_worker_that_only_waits_for_others_is_not_at_fault_and_the_odd_one_is_named_first(file: str) -> None:
    idle = Proc(8, 7, wait=Wait("pipe"), inside=(Frame("get", file, 103),))
    hung = Proc(9, 7, outside=(Frame("run", "/usr/lib/python3.11/multiprocessing/process.py", 108),))
    last = play(World([Proc(7, wait=Wait("poll")), idle, hung]), 70)[-1]
    assert last.pid == 9
    assert last.text.index("process 9 ") < last.text.index("process 8 ")


def test_a_process_that_only_keeps_house_is_not_mentioned() -> None:
    tracker = Proc(8, 7, outside=(Frame("main", "/usr/lib/python3.11/multiprocessing/resource_tracker.py", 200),))
    last = play(World([Proc(7, wait=Wait("lock")), tracker]), 70)[-1]
    assert (last.label, "process 8" in last.text) == ("STUCK_LOCK", False)


def test_a_dead_worker_that_nobody_noticed_is_at_fault() -> None:
    world = World(
        [Proc(7, wait=Wait("child")), Proc(8, 7), Proc(9, 7, state="Z", wait=Wait("zombie"), is_python=False)]
    )
    last = play(world, 70)[-1]
    assert (last.label, last.pid) == ("STUCK_CHILD", 9)
    assert "process 9 (python) is dead, but its parent has not noticed" in last.text


def test_other_threads_in_own_code_are_named_and_housekeeping_is_not() -> None:
    other = ThreadStack(12, "loader", (Frame("f", "/me/data.py", 3, "with b:", True),), False, "lock")
    monitor = ThreadStack(13, "tqdm", (Frame("run", "/s/site-packages/tqdm/_monitor.py", 60),), False, "sleep")
    text = play(World([Proc(7, threads=(other, monitor))]), 70)[-1].text
    assert text.endswith("; thread 'loader' waits for a lock at /me/data.py:3 `with b:`")


def test_a_shell_around_python_only_waits_and_python_leads() -> None:
    shell = Proc(6, comm="bash", is_python=False, wait=Wait("child"))
    last = play(World([shell, Proc(7, 6)]), 70)[-1]
    assert (last.label, last.pid) == ("STUCK_LOCK", 7)


def test_without_any_stack_it_is_still_told() -> None:
    verdicts = play(World([Proc(7)], stacks_every_s=0), 130)
    assert alarms(verdicts) == ["STUCK STUCK_LOCK"]
    assert verdicts[-1].text == "nothing has moved for 2 min 9 s: the main thread (pid 7) is waiting for a lock"


# -- what counts as progress ----------------------------------------------------------------------------------------


# On a busy machine a worker that computes for 5 ms and sleeps for 0.2 s uses less than 0.02 cores.
LITTLE_WORK = {"main_cores": 0.015, "main_sleeps": 3.0}
FLAG_CHECKS = {"main_cores": 0.0019, "main_sleeps": 20.0}  # every 50 ms, 0.09 ms each


def worker_under_shells(**does: float) -> World:
    shells = [Proc(pid, pid - 1, comm="sh", is_python=False, wait=Wait("child")) for pid in (8, 9, 10)]
    worker = Proc(11, 10, wait=Wait("sleep"), source="time.sleep(0.2)", **does)  # type: ignore[arg-type]
    return World([Proc(7, wait=Wait("child")), *shells, worker])


def test_a_worker_that_works_a_little_between_sleeps_sounds_no_alarm() -> None:
    assert alarms(play(worker_under_shells(**LITTLE_WORK), 600)) == []
    assert alarms(play(World([Proc(7, wait=Wait("sleep"), **LITTLE_WORK)]), 600)) == []  # type: ignore[arg-type]


def test_a_worker_that_only_checks_a_flag_is_found_later_than_one_that_never_wakes_up() -> None:
    verdicts = play(worker_under_shells(**FLAG_CHECKS), 600)
    assert alarms(verdicts) == ["SUSPECT STUCK_CHILD", "STUCK STUCK_CHILD"]
    assert first(verdicts, "SUSPECT") == 240
    assert alarms(play(worker_under_shells(), 100)) == ["STUCK STUCK_CHILD"]


def test_a_loop_of_naps_that_was_asleep_at_the_first_sample_alone_is_asleep() -> None:
    """`why --pid --for 1s` said STUCK about a loop that its last sample met between two naps."""
    trainer = Proc(7, wait=Wait("sleep"))

    def wakes(second: int) -> None:
        trainer.wait = Wait("lock") if second else Wait("sleep")

    limits = Thresholds(1.0, 1.0, waiting_after_s=1.0, proved_after_s=1.0)
    assert alarms(play(World([trainer]), 2, step=wakes, thresholds=limits)) in ([], ["SUSPECT SLEEPING"])


def test_what_may_be_work_or_the_check_of_a_flag_is_suspect_and_not_stuck() -> None:
    unclear = Proc(7, wait=Wait("sleep"), main_cores=0.0045, main_sleeps=10.0)
    assert alarms(play(World([unclear]), 1100)) == []
    assert alarms(play(World([unclear]), 1300)) == ["SUSPECT SLEEPING"]


class Napper(Proc):
    def reading(self) -> ProcessReading:
        return replace(super().reading(), threads=((self.pid, int(self.main_cpu_s * 1e9)),))


@pytest.mark.parametrize(("nap_s", "first_s", "is_stuck"), [(0.05, 250, True), (5.0, 1210, False)])
def test_a_loop_of_chosen_sleeps_looks_for_something_outside_that_comes_when_it_likes(
    nap_s: float, first_s: int, is_stuck: bool
) -> None:
    """A file that another job writes; a flag that is looked at 20 times a second is one of the program's own."""
    world = World([Napper(7, wait=Wait("sleep"), main_cores=0.0005, main_sleeps=1 / nap_s)])

    def step(second: int) -> None:
        world.processes[0].wait = Wait("sleep", until_s=1000.0 + second + nap_s)

    verdicts = play(world, 1300, step=step)
    kinds = [verdict.kind for verdict in verdicts]
    assert first_s - 20 <= kinds.index("SUSPECT") <= first_s and ("STUCK" in kinds) == is_stuck
    told = "; the main thread has only woken up to sleep again for 1 min; if nothing changes, SUSPECT in "
    assert told in verdicts[60].text
    suspect = verdicts[kinds.index("SUSPECT")]
    assert suspect.text.startswith("the main thread has only woken up to sleep again for ")


def test_a_monitor_beside_a_main_thread_at_a_lock_does_not_hide_it() -> None:
    monitor = Proc(8, 7, wait=Wait("sleep"), main_cores=0.005, main_sleeps=1.0)
    assert alarms(play(World([Proc(7), monitor]), 300)) == ["SUSPECT STUCK_LOCK"]


def watch_thread(leader: Proc, seconds: int) -> Verdict:
    """Another thread of the leader computes for 4 ms each second, in two runs."""
    judge, world = Judge(), World([leader])
    for second in range(seconds):
        sample = world.sample(second)
        threads, runs = ((7, 0), (9, second * 4_000_000)), (0, 2 * second)
        one = replace(sample.tree.processes[0], threads=threads, thread_runs=runs)
        found = judge.add(replace(sample, tree=replace(sample.tree, processes=(one,))))
        world.live()
    return found


def test_a_thread_that_works_a_little_keeps_it_from_being_stuck() -> None:
    assert watch_thread(Proc(7), 100).kind == "WAITING"
    assert watch_thread(Proc(7), 130).kind == "SUSPECT"


def test_a_main_thread_that_waits_for_a_thread_that_works_is_fine() -> None:
    worker = ThreadStack(9, "worker", (Frame("work", "/me/p7.py", 3, "score(row)", True),), False, "sleep")
    signal = (Frame("Event.wait", "/usr/lib/python3.11/threading.py", 629),)
    assert watch_thread(Proc(7, inside=signal, threads=(worker,)), 600).kind == "PROGRESS"


def test_an_event_loop_whose_timer_wakes_it_up_is_judged_like_a_sleep() -> None:
    leader = Proc(7, wait=Wait("local_socket"), main_cores=0.0006, main_sleeps=4.0)

    class Loop(World):
        def sample(self, second: int) -> Sample:
            sample = super().sample(second)
            tasks = ("task 'Task-1' awaits the end of a sleep at /me/p7.py:10",)
            return replace(sample, stacks=sample.stacks and tuple(replace(one, tasks=tasks) for one in sample.stacks))

    verdicts = play(Loop([leader]), 300)
    assert (first(verdicts, "STUCK"), first(verdicts, "SUSPECT")) == (-1, 240)
    asleep = Proc(7, wait=Wait("local_socket"))
    assert first(play(Loop([asleep]), 100), "STUCK") == 60


def test_the_last_byte_before_a_long_call_does_not_hide_that_it_is_busy() -> None:
    """A program reads its input, a stack is taken, and the read is counted only in the next sample."""
    world = World([Proc(7, wait=Wait("running"), state="R", main_cores=0.7, source="re.match(pattern, text)")])

    def write_once(second: int) -> None:
        world.processes[0].main_writes = 20 if second == 2 else 0

    verdicts = play(world, 40, step=write_once)
    assert (verdicts[-1].kind, verdicts[-1].label) == ("BUSY", "RUNNING_NATIVE")


@pytest.mark.parametrize(
    "alive",
    [
        pytest.param({"other_cores": 0.03}, id="cpu"),
        pytest.param({"disk": 1500}, id="disk"),
        pytest.param({"main_writes": 20}, id="its own log file"),
    ],
)
def test_any_counter_that_moves_keeps_it_from_being_stuck(alive: dict[str, float]) -> None:
    verdicts = play(World([Proc(7, **alive)]), 100)  # type: ignore[arg-type]
    assert first(verdicts, "STUCK") == -1


def test_bytes_on_the_network_keep_it_from_being_stuck() -> None:
    assert first(play(World([Proc(7)], tcp=100), 100), "STUCK") == -1
    assert first(play(World([Proc(7)], tcp=1), 100), "STUCK") == -1
    assert first(play(World([Proc(7)], tcp=0), 100), "STUCK") == 60


@pytest.mark.parametrize("quiet", [{"other_cores": 0.01}, {"disk": 300}])
def test_noise_below_the_limits_is_not_progress(quiet: dict[str, float]) -> None:
    assert first(play(World([Proc(7, **quiet)]), 70), "STUCK") == 60  # type: ignore[arg-type]


def test_the_noise_of_many_processes_is_not_progress() -> None:
    world = World([Proc(7, wait=Wait("poll")), *(Proc(pid, 7, other_cores=0.003) for pid in range(100, 125))])
    assert first(play(world, 70), "STUCK") == 60


def test_a_full_machine_makes_nothing_of_threads_that_only_wake_up() -> None:
    world = World([Proc(7, other_cores=0.002, queued_cores=0.4)])
    assert first(play(world, 70), "STUCK") == 60


def test_work_that_a_full_machine_hardly_lets_run_is_progress() -> None:
    assert alarms(play(World([Proc(7, other_cores=0.01, queued_cores=0.9)]), 400)) == []


def test_a_helper_process_is_not_progress() -> None:
    helper = Proc(9, 7, comm="wandb-core", is_python=False, other_cores=0.5, main_cores=0.3, main_writes=500)
    assert first(play(World([Proc(7), helper]), 70), "STUCK") == 60


def test_processes_that_come_and_go_are_progress_but_nvidia_smi_is_not() -> None:
    for comm, is_alarm in (("true", False), ("nvidia-smi", True)):
        world = World([Proc(7)])

        def step(second: int, world: World = world, comm: str = comm) -> None:
            del world.processes[1:]
            if second % 20 == 0:
                world.processes.append(Proc(100 + second, 7, comm=comm, is_python=False, main_cpu_s=0, other_cpu_s=0))

        assert (first(play(world, 100, step=step), "STUCK") >= 0) is is_alarm


def test_a_main_stack_that_moves_is_progress() -> None:
    world = World([Proc(7)])

    def step(second: int) -> None:
        world.processes[0].line = 10 + second // 30

    assert alarms(play(world, 200, step=step)) == []


# -- suspect --------------------------------------------------------------------------------------------------------


def test_a_deadlocked_main_thread_under_a_chatty_logger_is_suspect() -> None:
    verdicts = play(World([Proc(7, other_cores=0.01)], tcp=300), 130)
    assert alarms(verdicts) == ["SUSPECT STUCK_LOCK"]
    assert first(verdicts, "SUSPECT") == 120
    assert verdicts[-1].text == (
        "no main thread has moved for 2 min 9 s, though background threads still do: the main thread (pid 7) is "
        "waiting for a lock at /me/p7.py:10 `with lock:`"
    )


def test_a_thread_that_has_ended_moves_no_more() -> None:
    helper = ThreadStack(9, "helper", (Frame("work", "/me/p7.py", 3, "rows()", True),), False, "lock")
    world = World([Proc(7, wait=Wait("network"), threads=(helper,), num_threads=2)])

    def step(second: int) -> None:
        if second == 20:
            world.processes[0].threads, world.processes[0].num_threads = (), 1

    verdicts = play(world, 90, step=step)
    assert verdicts[-1].kind == "STUCK" and verdicts[-1].since_s <= 1021.0


@pytest.mark.parametrize("what", ["disk", "main_cores"])
def test_what_moved_lately_on_average_does_not_move_now(what: str) -> None:
    world = World([Proc(7, wait=Wait("network"))])

    def step(second: int) -> None:
        setattr(world.processes[0], what, (1.0 if what == "main_cores" else 1 << 20) if second == 10 else 0)

    verdicts = play(world, 80, step=step)
    assert verdicts[-1].kind == "STUCK" and verdicts[-1].since_s <= 1012.0


def test_lines_printed_by_another_thread_do_not_hide_a_deadlocked_main_thread() -> None:
    world = World([Proc(7)], stacks_every_s=30)

    def step(second: int) -> None:
        world.output_bytes += 40

    verdicts = play(world, 130, step=step)
    assert alarms(verdicts) == ["SUSPECT STUCK_LOCK"]
    assert "though output continues" in verdicts[-1].text


def test_lines_printed_by_the_main_thread_are_progress() -> None:
    world = World([Proc(7, main_writes=40)], stacks_every_s=30)

    def step(second: int) -> None:
        world.output_bytes += 40

    assert alarms(play(world, 400, step=step)) == []


def test_output_counts_where_nobody_can_tell_who_wrote_it() -> None:
    world = World([Proc(7, has_main_counters=False)])

    def step(second: int) -> None:
        world.output_bytes += 40 if second % 30 == 0 else 0

    assert alarms(play(world, 400, step=step)) == []


def test_a_mark_of_progress_is_progress_whoever_made_it() -> None:
    world = World([Proc(7)])

    def step(second: int) -> None:
        world.marks = second // 50

    assert alarms(play(world, 400, step=step)) == []


def test_one_worker_that_moves_is_enough() -> None:
    world = World([Proc(7, wait=Wait("poll")), Proc(8, 7), Proc(9, 7)])

    def step(second: int) -> None:
        world.processes[2].line = second // 40

    assert alarms(play(world, 400, step=step)) == []


def test_a_main_thread_that_is_worked_for_is_busy_and_no_alarm() -> None:
    verdicts = play(World([Proc(7, other_cores=1.0)]), 400)
    assert alarms(verdicts) == []
    assert (verdicts[-1].kind, verdicts[-1].label) == ("BUSY", "WAITING_LOCK")
    assert verdicts[-1].text == ("waiting at /me/p7.py:10 `with lock:` for 6 min 37 s while others work (1.0 cores)")


def test_a_queue_fed_by_a_downloading_thread_is_no_alarm() -> None:
    assert alarms(play(World([Proc(7, other_cores=0.01)], tcp=200_000), 1000)) == []
    assert alarms(play(World([Proc(7, other_cores=0.01)], tcp=4_000), 500)) == []


def test_a_trickle_that_feeds_a_main_thread_for_ten_minutes_is_suspect_after_all() -> None:
    assert first(play(World([Proc(7, other_cores=0.01)], tcp=4_000), 700), "SUSPECT") == 600


# -- busy -----------------------------------------------------------------------------------------------------------


def test_one_long_call_is_busy_for_ever_and_never_stuck() -> None:
    verdicts = play(World([Proc(7, state="R", wait=Wait("running"), main_cores=1.0, source="re.match(a, b)")]), 4000)
    assert alarms(verdicts) == []
    assert verdicts[-1] == Verdict(
        "BUSY",
        "RUNNING_NATIVE",
        1002.0,
        "busy in /me/p7.py:10 `re.match(a, b)` for 1 h 6 min, in each of 800 looks (1.0 cores)",
        Frame("work", "/me/p7.py", 10, "re.match(a, b)", True),
        7,
    )
    assert first(verdicts, "BUSY") == 12  # the third look at the same line


def test_a_starved_spinner_on_a_full_machine_is_busy_too() -> None:
    process = Proc(7, state="R", wait=Wait("running"), main_cores=0.15)
    assert alarms(play(World([process]), 400)) == []


def test_a_long_compile_in_a_child_is_busy_with_the_child_named() -> None:
    child = Proc(8, 7, comm="cc1plus", is_python=False, state="R", wait=Wait("running"), main_cores=1.0)
    verdicts = play(World([Proc(7, wait=Wait("child"), source="subprocess.run(cmd)"), child]), 600)
    assert alarms(verdicts) == []
    assert (verdicts[-1].kind, verdicts[-1].label, verdicts[-1].pid) == ("BUSY", "WAITING_CHILD", 8)
    assert "while process 8 (cc1plus) works (1.0 cores)" in verdicts[-1].text


def test_a_stack_that_moves_is_progress_not_busy() -> None:
    world = World([Proc(7, state="R", wait=Wait("running"), main_cores=1.0)])

    def step(second: int) -> None:
        world.processes[0].line = second

    verdicts = play(world, 60, step=step)
    first = verdicts[25]
    assert (first.kind, first.label, first.text) == ("PROGRESS", "RUNNING_CPU", "running (1.0 cores)")
    last = verdicts[-1]
    assert (last.kind, last.label, last.rule) == ("BUSY", "RUNNING_CPU", "looping")
    assert "busy in " in last.text and "long work, or a loop that does not end" in last.text


@pytest.mark.parametrize("prints", [False, True])
def test_a_loop_that_calls_a_library_or_prints_is_progress(prints: bool) -> None:
    world = World([Proc(7, state="R", wait=Wait("running"), main_cores=1.0)])

    def step(second: int) -> None:
        world.processes[0].line = second
        forward = (Frame("forward", "/usr/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134),)
        world.processes[0].inside = forward if second % 3 and not prints else ()
        world.output_bytes = second // 20 if prints else 0

    assert {verdict.kind for verdict in play(world, 90, step=step)} == {"PROGRESS"}


def test_output_at_the_same_line_is_progress_not_busy() -> None:
    world = World([Proc(7, state="R", wait=Wait("running"), main_cores=1.0, main_writes=10)])

    def step(second: int) -> None:
        world.output_bytes = second

    assert {verdict.kind for verdict in play(world, 60, step=step)} == {"PROGRESS"}


# -- sleeping -------------------------------------------------------------------------------------------------------


def sleeper(**more: object) -> Proc:
    return Proc(7, wait=Wait("sleep"), source="time.sleep(20)", **more)  # type: ignore[arg-type]


def burst(world: World, every_s: int, cpu_s: float) -> object:
    def step(second: int) -> None:
        if second % every_s == 0:
            world.processes[0].main_cpu_s += cpu_s

    return step


def test_sleepy_data_with_a_little_work_between_is_no_alarm() -> None:
    world = World([sleeper()])
    assert alarms(play(world, 1000, step=burst(world, 20, 0.010))) == []


def test_work_of_a_third_of_a_second_in_three_is_no_alarm() -> None:
    world = World([sleeper()])
    assert alarms(play(world, 400, step=burst(world, 3, 0.3))) == []


def test_a_loop_that_sleeps_and_looks_at_a_flag_is_suspect_late_and_stuck_later() -> None:
    verdicts = play(World([sleeper(main_cores=0.0002)]), 500)
    assert (first(verdicts, "SUSPECT"), first(verdicts, "STUCK")) == (240, 480)
    assert alarms(verdicts) == ["SUSPECT SLEEPING", "STUCK STUCK"]


def test_a_sleeper_caught_awake_is_still_a_sleeper() -> None:
    world = World([sleeper(main_cores=0.0002)])

    def step(second: int) -> None:
        world.processes[0].wait = Wait("file") if second % 4 == 3 else Wait("sleep")

    verdicts = play(world, 500, step=step)
    assert (first(verdicts, "SUSPECT"), first(verdicts, "STUCK")) == (240, 480)


def test_one_endless_sleep_is_suspect_at_the_limit_and_stuck_at_twice() -> None:
    verdicts = play(World([sleeper()]), 260)
    assert (first(verdicts, "SUSPECT"), first(verdicts, "STUCK")) == (120, 240)


def test_a_rank_that_asks_the_store_for_the_others_is_suspect_at_the_limit() -> None:
    """It sleeps between its questions, and they move 8 kB a second over a socket to itself. That is no work."""
    folder = "/v/lib/python3.11/site-packages/torch/distributed"
    store = Frame("_create_c10d_store", f"{folder}/rendezvous.py", 199, "return TCPStore(")
    joins = Frame("init_process_group", f"{folder}/distributed_c10d.py", 1800)
    world = World([sleeper(inside=(store, joins), main_cores=0.002, main_sleeps=100.0)], tcp=8_400)
    verdicts = play(world, 200)
    assert first(verdicts, "SUSPECT") in (120, 121)
    assert alarms(verdicts) == ["SUSPECT STUCK_RANKS"]
    assert "waiting for the other ranks of the job to start" in verdicts[60].text


def test_a_retry_with_backoff_up_to_a_minute_is_no_alarm() -> None:
    world = World([sleeper()])
    tries = {0, 1, 3, 7, 15, 31, 63, 127}

    def step(second: int) -> None:
        if second in tries:
            world.processes[0].main_cpu_s += 0.004

    assert alarms(play(world, 180, step=step)) == []


# -- disk -----------------------------------------------------------------------------------------------------------


def test_a_long_fsync_gets_five_times_the_patience() -> None:
    verdicts = play(World([Proc(7, state="D", wait=Wait("disk", "/d/model.pt"))]), 330)
    assert (first(verdicts, "STUCK"), alarms(verdicts)) == (300, ["STUCK STUCK_DISK"])


def test_a_saving_thread_in_the_kernel_gets_it_too() -> None:
    saver = ThreadStack(12, "saver", (Frame("save", "/me/save.py", 3, "os.fsync(fd)", True),), False, "disk /d/x")
    assert first(play(World([Proc(7, threads=(saver,))]), 330), "STUCK") == 300


# -- keyboard, stopped ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("can_type", "how"),
    [
        (True, "type the answer in the terminal of this run (`jackline watch` shows it)"),
        (False, "it can be answered in the terminal /dev/pts/1"),
    ],
)
def test_a_question_at_a_terminal_is_told_after_five_seconds_and_is_no_alarm(can_type: bool, how: str) -> None:
    world = World([Proc(7, wait=Wait("keyboard", "/dev/pts/1", 0), source='input("name? ")')])
    verdicts = play(world, 400, thresholds=Thresholds(can_type=can_type))
    assert alarms(verdicts) == []
    assert verdicts[10] == Verdict(
        "WAITING",
        "KEYBOARD",
        1001.0,
        f'waiting for keyboard input for 9.0 s at /me/p7.py:10 `input("name? ")` (process 7); {how}',
        Frame("work", "/me/p7.py", 10, 'input("name? ")', True),
        7,
    )


def test_a_prompt_with_a_connected_input_is_never_stuck() -> None:
    world = World([Proc(7, wait=Wait("keyboard", "standard input (a pipe)", 0), source="code.interact()")])
    verdicts = play(world, 1000)
    assert alarms(verdicts) == ["SUSPECT KEYBOARD"]
    assert first(verdicts, "SUSPECT") == 6
    assert verdicts[-1].text.endswith(
        "its input is connected, but nothing comes; without --tty you cannot type to it"
    )


def test_a_question_over_a_pipe_is_a_question() -> None:
    world = World([Proc(7, wait=Wait("pipe", "output of sh (pid 3)", 0), source="answer = input()")])
    assert alarms(play(world, 20)) == ["SUSPECT KEYBOARD"]


def test_a_question_is_called_one_however_small_the_limits() -> None:
    world = World([Proc(7, wait=Wait("pipe", "output of sh (pid 3)", 0), source="answer = input()")])
    limits = Thresholds(suspect_after_s=8, stuck_after_s=4)
    assert alarms(play(world, 20, thresholds=limits)) == ["SUSPECT KEYBOARD"]


def test_a_child_that_asks_is_found() -> None:
    child = Proc(8, 7, comm="apt", is_python=False, wait=Wait("keyboard", "/dev/pts/1", 0))
    verdicts = play(World([Proc(7, wait=Wait("child")), child]), 20)
    assert (verdicts[-1].label, verdicts[-1].pid) == ("KEYBOARD", 8)


def test_a_reader_of_the_keyboard_beside_a_busy_trainer_is_no_alarm() -> None:
    reader = Proc(8, 6, comm="cat", is_python=False, wait=Wait("keyboard", "/dev/pts/1", 0))
    trainer = Proc(7, 6, state="R", wait=Wait("running"), main_cores=1.0)
    shell = Proc(6, comm="sh", is_python=False, wait=Wait("child"))
    assert alarms(play(World([shell, reader, trainer]), 100)) == []


def test_a_paused_main_process_is_called_paused_at_once_and_never_stuck() -> None:
    verdicts = play(World([Proc(7, state="T", wait=Wait("stopped"))]), 1000)
    assert {verdict.kind for verdict in verdicts} == {"PAUSED"}
    assert (verdicts[-1].label, verdicts[-1].since_s, verdicts[-1].pid) == ("STOPPED", 1000.0, 7)
    assert verdicts[-1].text == (
        "paused (SIGSTOP): the main process (pid 7) at /me/p7.py:10 `with lock:`; `kill -CONT 7` continues it"
    )


def test_a_paused_worker_that_the_main_process_waits_for_pauses_the_run() -> None:
    world = World([Proc(7, wait=Wait("poll")), Proc(8, 7), Proc(9, 7, state="T", wait=Wait("stopped"), line=4)])
    verdicts = play(world, 1000)
    last = verdicts[-1]
    assert first(verdicts, "PAUSED") == 10
    assert alarms(verdicts) == []
    assert (last.kind, last.label, last.pid) == ("PAUSED", "STOPPED_CHILD", 9)
    assert last.text == (
        "paused (SIGSTOP): process 9 (python) at /me/p9.py:4 `with lock:`; the main thread (pid 7) is waiting for "
        "events at /me/p7.py:10 `with lock:`; `kill -CONT 9` continues it"
    )


@pytest.mark.parametrize(("state", "wait"), [("T", Wait("stopped")), ("t", Wait("stopped", "by a debugger"))])
def test_the_time_of_a_pause_does_not_count_as_a_standstill(state: str, wait: Wait) -> None:
    """It waits for the network before and after the pause, so no counter of it moves when it is continued."""
    process = Proc(7, wait=Wait("network"))

    def step(second: int) -> None:
        paused = 30 <= second < 500
        process.state, process.wait = (state, wait) if paused else ("S", Wait("network"))

    verdicts = play(World([process]), 600, step=step)
    assert first(verdicts, "STUCK") == 560


def test_a_pause_teaches_no_interval() -> None:
    process = Proc(7, state="R", wait=Wait("running"), main_cores=1.0)

    def step(second: int) -> None:
        is_paused = second < 500 and second % 50 >= 10
        process.state, process.wait = ("T", Wait("stopped")) if is_paused else ("R", Wait("running"))
        process.main_cores = 1.0 if second < 500 and not is_paused else 0.0
        if second >= 500:
            process.state, process.wait = "S", Wait("lock")

    verdicts = play(World([process]), 600, step=step)
    assert 560 <= first(verdicts, "STUCK") <= 570


def test_a_stopped_process_in_a_tree_that_works_is_no_alarm() -> None:
    world = World([Proc(7, state="R", wait=Wait("running"), main_cores=1.0), Proc(8, 7, state="T")])
    assert alarms(play(world, 100)) == []


def test_a_process_held_by_a_debugger_is_paused_and_no_alarm() -> None:
    verdicts = play(World([Proc(7, state="t", wait=Wait("stopped", "by a debugger"))]), 1000)
    assert alarms(verdicts) == []
    assert verdicts[-1].kind == "PAUSED"
    assert verdicts[-1].text == (
        "paused (by a debugger): the main process (pid 7) at /me/p7.py:10 `with lock:`; "
        "detach the debugger to continue"
    )


def test_one_look_by_a_tracer_is_no_pause_and_no_movement() -> None:
    """py-spy stops a process for milliseconds when it reads native stacks."""
    process = Proc(7)

    def step(second: int) -> None:
        is_looked_at = second == 40
        process.state, process.wait = ("t", Wait("stopped", "by a debugger")) if is_looked_at else ("S", Wait("lock"))

    verdicts = play(World([process]), 70, step=step)
    assert "PAUSED" not in {verdict.kind for verdict in verdicts}
    assert first(verdicts, "STUCK") == 60


# -- GPU ------------------------------------------------------------------------------------------------------------


def on_gpu(**more: object) -> Proc:
    return Proc(7, state="R", wait=Wait("running"), source="loss.item()", main_cores=1.0, **more)  # type: ignore[arg-type]


def test_full_use_without_memory_or_power_is_a_spin() -> None:
    world = World([on_gpu()], gpus=(gpu(),))

    def step(second: int) -> None:
        world.gpus = (gpu(utilisation_percent=100) if second >= 5 else gpu(),)

    verdicts = play(world, 80, step=step)
    assert alarms(verdicts) == ["SUSPECT GPU_SPIN"]
    assert first(verdicts, "SUSPECT") == 65
    assert verdicts[-1].text == (
        "the GPU shows full use but has touched no memory and drawn idle power for 1 min 14 s: a kernel or a "
        "collective seems to hang; the main thread (pid 7) is running at /me/p7.py:10 `loss.item()`"
    )


def test_a_gpu_that_was_cold_before_its_first_context_is_not_taken_for_one_that_works() -> None:
    """Measured on an H200: 80 W without a context, 125 W of 700 W with a kernel that spins for ever."""
    world = World([on_gpu()], gpus=(gpu(power_w=80.0, power_limit_w=700.0),))

    def step(second: int) -> None:
        if second >= 5:
            world.gpus = (gpu(utilisation_percent=100, power_w=125.0, power_limit_w=700.0),)

    assert alarms(play(world, 80, step=step)) == ["SUSPECT GPU_SPIN"]


@pytest.mark.parametrize(
    "working",
    [
        {"memory_utilisation_percent": 21, "power_w": 691.0},
        {"memory_utilisation_percent": 0, "power_w": 300.0},
        {"memory_utilisation_percent": 3, "power_w": 124.0},
    ],
)
def test_a_gpu_that_really_works_is_no_alarm_even_if_the_main_thread_sleeps(working: dict[str, float]) -> None:
    world = World([Proc(7, wait=Wait("poll"))], gpus=(gpu(),))

    def step(second: int) -> None:
        world.gpus = (gpu(utilisation_percent=100, **working) if second else gpu(),)

    assert alarms(play(world, 400, step=step)) == []


def test_a_gpu_in_other_hands_neither_works_nor_spins_for_us() -> None:
    theirs = gpu(utilisation_percent=100, memory_utilisation_percent=40, processes=(GpuProcess(99, 1),))
    assert first(play(World([Proc(7)], gpus=(theirs,)), 70), "STUCK") == 60
    spinning = gpu(utilisation_percent=100, processes=(GpuProcess(99, 1),))
    assert alarms(play(World([on_gpu()], gpus=(spinning,)), 100)) == []


def test_memory_held_on_an_idle_gpu_is_not_progress() -> None:
    idle = gpu(processes=(GpuProcess(7, 1 << 30),))
    assert first(play(World([Proc(7)], gpus=(idle,)), 70), "STUCK") == 60


# -- clocks and thresholds ------------------------------------------------------------------------------------------


def test_a_paused_machine_is_not_held_against_the_program() -> None:
    world = World([Proc(7)])

    def step(second: int) -> None:
        world.late_s = 0.0
        if second == 50:
            world.at_s += 3600
            world.late_s = 3600.0

    verdicts = play(world, 115, step=step)
    assert first(verdicts, "STUCK") == 110
    assert verdicts[-1].since_s == 1000.0 + 50 + 3600


def test_the_line_is_still_known_after_a_pause() -> None:
    world = World([Proc(7)])

    def step(second: int) -> None:
        world.late_s = 60.0 if second == 3 else 0.0
        world.stacks_every_s = 5 if second < 3 else 0

    last = play(world, 70, step=step)[-1]
    assert last.frame is not None and last.frame.line == 10


def test_a_slow_rhythm_lengthens_the_patience() -> None:
    world = World([Proc(7, wait=Wait("network"))])

    def step(second: int) -> None:
        if second <= 300 and second % 25 == 0:
            world.processes[0].main_cpu_s += 0.05  # a step every 25 s, silently

    # 24 quiet seconds between steps, times ten.
    assert first(play(world, 700, step=step), "STUCK") == 300 + 240


def test_patience_has_an_end() -> None:
    world = World([Proc(7, wait=Wait("network"))])

    def step(second: int) -> None:
        if second <= 1500 and second % 150 == 0:
            world.marks += 1

    thresholds = Thresholds(stuck_after_s=300)
    assert first(play(world, 3000, step=step, thresholds=thresholds), "STUCK") == 1500 + 900


def test_rare_output_lengthens_the_patience_for_suspicion() -> None:
    world = World([Proc(7, main_writes=0, other_cores=0.01)], tcp=300)

    def step(second: int) -> None:
        if second <= 360 and second % 40 == 0:
            world.marks += 1

    assert first(play(world, 1000, step=step), "SUSPECT") == 360 + 390


def test_small_limits_work_on_small_scales() -> None:
    verdicts = play(World([Proc(7)]), 20, thresholds=Thresholds(suspect_after_s=10, stuck_after_s=5))
    assert first(verdicts, "STUCK") == 5


def test_the_judge_says_what_the_pure_function_says() -> None:
    world = World([Proc(7, wait=Wait("poll")), Proc(8, 7)])
    judge, samples = Judge(), []
    for second in range(70):
        samples.append(world.sample(second))
        assert judge.add(samples[-1]) == verdict(samples, Thresholds())
        world.live()


def test_no_sample_and_no_process_are_not_alarming() -> None:
    assert verdict([], Thresholds()) == Verdict("PROGRESS", "STARTING", 0.0, "nothing has been seen yet")
    assert verdict([World([]).sample(0)], Thresholds()) == Verdict("PROGRESS", "ENDED", 1000.0, "it has ended")


def test_a_pid_used_again_by_another_process_starts_from_nothing() -> None:
    world = World([Proc(7), Proc(8, 7)])

    def step(second: int) -> None:
        if second == 40:
            reused = Proc(8, 7, line=99)
            reused.main_cpu_s = reused.other_cpu_s = 0.0
            real = reused.reading
            reused.reading = lambda: replace(real(), start_ticks=12345)  # type: ignore[method-assign]
            world.processes[1] = reused

    assert first(play(world, 105, step=step), "STUCK") == 100


@pytest.mark.parametrize(
    ("process", "label"),
    [
        (Proc(7, disk=400_000, wait=Wait("file")), "WAITING_DISK"),
        (Proc(7, wait=Wait("network"), main_cores=0.05), "WAITING_NETWORK"),
        (Proc(7, wait=Wait("lock"), main_writes=5), "WAITING_LOCK"),
        (Proc(7, wait=Wait("sleep"), main_writes=5), "SLEEPING"),
        (Proc(7, wait=Wait("running"), state="R", other_cores=0.5, is_python=False), "RUNNING_CPU"),
    ],
)
def test_progress_is_labelled_too(process: Proc, label: str) -> None:
    last = play(World([process]), 10)[-1]
    assert (last.kind, last.label) == ("PROGRESS", label)


def test_a_standstill_of_some_seconds_is_waiting_and_says_when_it_becomes_an_alarm() -> None:
    verdicts = play(World([Proc(7)]), 61)
    assert [first(verdicts, kind) for kind in ("WAITING", "STUCK")] == [5, 60]
    last = verdicts[30]
    assert (last.kind, last.label, last.next_kind, last.next_in_s) == ("WAITING", "WAITING_LOCK", "STUCK", 30.0)
    assert last.text == (
        "waiting for another thread at /me/p7.py:10 `with lock:`; nothing has moved for 30 s; "
        "if nothing changes, STUCK in 30 s"
    )


def test_a_quiet_main_thread_beside_a_logger_is_waiting_and_says_when_it_becomes_suspect() -> None:
    verdicts = play(World([Proc(7)], tcp=30), 130)
    assert (first(verdicts, "WAITING"), first(verdicts, "SUSPECT")) == (5, 120)
    assert verdicts[60].text.endswith("the main thread has not moved for 1 min; if nothing changes, SUSPECT in 1 min")


def test_a_stalled_download_is_called_network_within_ten_seconds() -> None:
    wait = Wait("network", "10.0.0.3:443", 5)
    last = play(World([Proc(7, wait=wait, source="body = response.read()")]), 10)[-1]
    assert (last.kind, last.label) == ("WAITING", "WAITING_NETWORK")
    assert last.text.startswith("waiting for the network (10.0.0.3:443, 0 B/s) at /me/p7.py:10")


def test_what_our_own_stack_reader_does_to_a_process_is_not_movement() -> None:
    """A native dump wakes it up, costs CPU and writes a file."""
    process = Proc(7)
    world = World([process])
    judge = Judge()
    verdicts = []
    for second in range(70):
        is_looked_at = second == 40
        process.main_cores, process.main_writes = (0.2, 4000) if second == 39 else (0.0, 0)
        verdicts.append(judge.add(replace(world.sample(second), disturbed=frozenset({7} if is_looked_at else ()))))
        world.live()
    assert first(verdicts, "STUCK") == 60


def test_a_thread_that_runs_between_two_endless_waits_has_moved() -> None:
    """A byte a second from a FIFO costs a few microseconds of CPU, and nothing else changes."""
    endless = Wait("pipe", "/tmp/fifo", 3, is_endless=True)
    assert alarms(play(World([Proc(7, wait=endless, main_cores=2e-5)]), 300)) == []
    # A loop that looks at a flag has a time limit in its call.
    assert alarms(play(World([Proc(7, wait=replace(endless, is_endless=False), main_cores=2e-5)]), 300)) != []


def test_a_pool_whose_threads_change_lines_works_for_the_main_thread_that_collects() -> None:
    def worker(line: int) -> tuple[ThreadStack, ...]:
        frames = (
            Frame("fetch", "/me/p7.py", line, "", True),
            Frame("_worker", "/lib/concurrent/futures/thread.py", 83),
        )
        return (ThreadStack(12, "ThreadPoolExecutor-0_0", frames),)

    process = Proc(7, inside=(Frame("result", "/lib/concurrent/futures/_base.py", 451),), threads=worker(30))

    def step(second: int) -> None:
        process.threads = worker(30 + second // 5 % 2)

    assert alarms(play(World([process]), 400, step=step)) == []
    assert alarms(play(World([process]), 400)) == ["STUCK STUCK_LOCK"]


def test_sockets_that_come_and_go_between_samples_are_activity() -> None:
    world = World([Proc(7)])
    judge = Judge()
    verdicts = []
    for second in range(100):
        sample = world.sample(second)
        sockets = {second // 2: 310}  # the sum of bytes over open sockets never changes
        verdicts.append(judge.add(replace(sample, tree=replace(sample.tree, sockets=sockets))))
        world.live()
    assert first(verdicts, "STUCK") == -1


def test_what_our_own_signal_costs_is_not_taken_for_progress() -> None:
    process = Proc(7, method="faulthandler")
    world = World([process])

    def step(second: int) -> None:
        if second % 5 == 2:
            process.main_cpu_s += 0.003
            process.wchar += 9000
            process.disk_bytes += 12_288

    assert first(play(world, 90, step=step), "STUCK") in range(60, 75)


# -- real programs --------------------------------------------------------------------------------------------------


def judged(folder: Path, text: str, waits: str, kinds: tuple[str, ...], limits: Thresholds) -> tuple[Verdict, int]:
    """Watch a real program at four samples a second until one of the kinds is said; returns it and the line."""
    judge, deadline_s = Judge(limits), time.monotonic() + HANGS_S
    with hanging(folder, text, waits=waits) as program:
        for number in range(10_000):
            tree = read_tree(program.pid, with_network=True)
            pids = [process.pid for process in tree.processes]
            stacks = sample_stacks(pids, stacks_folder=program.stacks) if number % 8 == 0 else None
            found = judge.add(Sample(time.monotonic(), 0.0, tree, stacks=stacks))
            if found.kind in kinds:
                return found, program.line()
            assert time.monotonic() < deadline_s, found
            time.sleep(0.25)
    raise AssertionError("unreachable")


QUICK = Thresholds(suspect_after_s=3, stuck_after_s=2)


def test_a_real_worker_that_was_stopped_pauses_the_run(tmp_path: Path) -> None:
    found, _ = judged(tmp_path, STOPPED_WORKER, "local_socket", ("PAUSED", "STUCK", "SUSPECT"), QUICK)
    assert (found.kind, found.label) == ("PAUSED", "STOPPED_CHILD")
    assert found.text.startswith("paused (SIGSTOP): process ")


@pytest.mark.parametrize(
    ("text", "waits", "label", "words"),
    [
        pytest.param(LOCK_ABBA, "lock", "STUCK_LOCK", "thread 'other' waits for a lock", id="lock-abba"),
        pytest.param(SOCKET_RECV, "network", "STUCK_NET", "waiting for the network (127.0.0.1:", id="socket-recv"),
        pytest.param(FORK_DEADLOCK, "child", "STUCK_CHILD", "with lock:  # THERE", id="fork-deadlock"),
        pytest.param(GIL_IN_C, "sleep", "STUCK", "is sleeping", id="gil-held-in-c"),
    ],
)
def test_a_real_hang_is_stuck_and_named(text: str, waits: str, label: str, words: str, tmp_path: Path) -> None:
    found, line = judged(tmp_path, text, waits, ("STUCK",), QUICK)
    assert found.label == label
    assert words in found.text
    assert found.frame is not None
    assert (found.frame.file, found.frame.line) == (str(tmp_path / "program.py"), line)


def test_a_real_sleep_loop_is_suspect(tmp_path: Path) -> None:
    found, line = judged(tmp_path, SLEEP_LOOP, "sleep", ("SUSPECT", "STUCK"), QUICK)
    assert (found.kind, found.label) == ("SUSPECT", "SLEEPING")
    assert found.frame is not None and found.frame.line == line


def test_a_real_noisy_logger_does_not_hide_the_deadlock(tmp_path: Path) -> None:
    found, line = judged(tmp_path, NOISY_LOGGER, "lock", ("SUSPECT", "STUCK"), QUICK)
    assert (found.kind, found.label) == ("SUSPECT", "STUCK_LOCK")
    assert found.frame is not None and found.frame.line == line


def test_a_real_backtracking_regex_is_busy(tmp_path: Path) -> None:
    found, line = judged(tmp_path, REGEX, "", ("BUSY", "SUSPECT", "STUCK"), QUICK)
    assert (found.kind, found.label) == ("BUSY", "RUNNING_NATIVE")
    assert found.frame is not None and found.frame.line == line

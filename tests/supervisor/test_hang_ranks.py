"""Collective hangs on hand-made process trees: who has arrived, who has not, and where it is instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from jackline.diagnosis.doing import MEETING_HINT, meeting
from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.machine.proc import rank_in
from jackline.machine.readings import RankPlace, Wait, ranks_among
from jackline.supervisor.hang.deadlock import Deadlock, Member
from jackline.supervisor.hang.ranks import collective_at
from jackline.supervisor.hang.sample import FarRank
from jackline.supervisor.hang.verdict import Sample, Verdict
from tests.supervisor.worlds import Proc, World, alarms, play

C10D = "/v/site-packages/torch/distributed/distributed_c10d.py"
SPAWN = "/v/site-packages/torch/multiprocessing/spawn.py"
WITHIN_S = 30


def rank(number: int, size: int = 4, *, call: str = "all_reduce", line: int = 13, wait: str = "lock") -> Proc:
    """A rank that waits in a collective; with call='' one that is somewhere else."""
    inside = (Frame(call, C10D, 3000), Frame("wrapper", C10D, 80)) if call else ()
    source = f"dist.{call}(loss)" if call else "time.sleep(1000)"
    place = RankPlace(number, size, number)
    proc = Proc(10 + number, ppid=5, line=line, source=source, inside=inside, rank=place, file="/me/train.py")
    proc.wait = Wait(wait)  # type: ignore[arg-type]
    return proc


def launched(*ranks: Proc) -> World:
    return World([Proc(5, comm="pt_elastic", wait=Wait("child")), *ranks])


def last(verdicts: list[Verdict]) -> Verdict:
    return verdicts[-1]


def test_a_rank_that_does_not_arrive_is_named_first_with_its_line() -> None:
    away = rank(2, call="", line=11, wait="lock")
    found = last(play(launched(rank(0), rank(1), away, rank(3)), WITHIN_S))
    assert (found.kind, found.label, found.pid) == ("STUCK", "STUCK_RANKS", 12)
    assert found.text.startswith(
        "rank 2 (pid 12) has not arrived: it is waiting for a lock at /me/train.py:11 `time.sleep(1000)`; "
    )
    assert "ranks 0-1, 3 have waited for " in found.text


@pytest.mark.parametrize(("is_cycle", "label"), [(True, "DEADLOCK"), (False, "STUCK_RANKS")])
def test_a_missing_rank_that_is_proved_to_wait_for_itself_is_called_a_deadlock(is_cycle: bool, label: str) -> None:
    member = Member(11, 11, "the main thread", "lock 'lock'", "/me/train.py:11", "lock 'lock'", "/me/train.py:10")
    proof = Deadlock((member,), is_cycle, "it waits for itself", has_main=False)

    class Proved(World):
        def sample(self, second: int) -> Sample:
            return replace(super().sample(second), was_asked=True, deadlock=proof)

    world = Proved(launched(rank(0, 2), rank(1, 2, call="", line=11)).processes)
    found = last(play(world, WITHIN_S))
    assert (found.kind, found.label, found.pid) == ("STUCK", label, 11)
    assert found.deadlock == (proof if is_cycle else None)
    assert found.text.endswith("it waits for itself")


def test_a_rank_that_sleeps_is_suspected_only() -> None:
    found = last(play(launched(rank(0), rank(1, call="", line=11, wait="sleep")), WITHIN_S))
    assert (found.kind, found.label, found.pid) == ("SUSPECT", "STUCK_RANKS", 11)


def test_a_rank_that_sleeps_again_and_again_is_never_called_stuck() -> None:
    """An evaluation that polls: now and then it is seen at a lock between two sleeps."""
    polls = rank(1, 2, call="", line=11, wait="sleep")
    polls.main_cores, polls.main_sleeps = 0.0019, 20.0

    def wake(second: int) -> None:
        polls.wait = Wait("lock" if second % 4 == 3 else "sleep")

    assert not alarms(play(launched(rank(0, 2), polls), 55, step=wake))
    assert set(alarms(play(launched(rank(0, 2), polls), 120, step=wake))) == {"SUSPECT STUCK_RANKS"}


def test_a_rank_that_works_is_waited_for_without_an_alarm_however_long() -> None:
    busy = rank(1, call="", line=11, wait="running")
    busy.main_cores = 0.9
    verdicts = play(launched(rank(0), busy), 300)
    assert alarms(verdicts) == []
    assert last(verdicts).kind == "BUSY"
    assert last(verdicts).text.startswith("rank 1 (pid 11) has not arrived: it is running at /me/train.py:11")


def test_a_rank_whose_worker_reads_data_is_no_alarm() -> None:
    away = rank(1, call="", line=11, wait="pipe")
    worker = Proc(30, ppid=11, wait=Wait("running"), main_cores=0.5, rank=away.rank)
    assert alarms(play(launched(rank(0), away, worker), 120)) == []


def test_ranks_in_different_collectives_are_told_apart_the_odd_one_first() -> None:
    ranks = [rank(0), rank(1), rank(2, call="barrier", line=20), rank(3)]
    found = last(play(launched(*ranks), WITHIN_S))
    assert (found.kind, found.pid) == ("STUCK", 12)
    assert found.text.startswith("the ranks wait for one another in different calls for ")
    assert found.text.endswith(
        ": rank 2 waits in barrier at /me/train.py:20 `dist.barrier(loss)`; "
        "ranks 0-1, 3 wait in all_reduce at /me/train.py:13 `dist.all_reduce(loss)`"
    )


def test_all_ranks_in_one_collective_without_traffic_are_stuck() -> None:
    def same(number: int) -> Proc:
        return Proc(
            10 + number,
            ppid=5,
            source="dist.all_reduce(x)",
            file="/me/train.py",
            inside=(Frame("all_reduce", C10D, 3000),),
            rank=RankPlace(number, 2, number),
        )

    found = last(play(launched(same(0), same(1)), WITHIN_S))
    assert found.kind == "STUCK"
    assert found.text.startswith("all 2 ranks have stood in all_reduce at /me/train.py:10 `dist.all_reduce(x)` for ")
    world = launched(same(0), same(1))
    world.tcp = 10_000_000  # a large exchange over a slow network takes its time
    assert alarms(play(world, 200)) == []


def test_a_rank_that_has_ended_while_the_others_wait_is_named() -> None:
    world = launched(rank(0, 2), rank(1, 2, call="", wait="running"))
    world.processes[2].main_cores = 0.9

    def step(second: int) -> None:
        if second == 10:
            del world.processes[2]

    found = last(play(world, 10 + WITHIN_S, step=step))
    assert found.kind == "STUCK"
    assert found.text.startswith("rank 1 has ended, and the others wait for it: rank 0 has waited for ")


def test_a_stopped_rank_is_named_as_a_rank() -> None:
    away = rank(1, 2, call="", wait="stopped")
    away.state = "T"
    found = last(play(launched(rank(0, 2), away), WITHIN_S))
    assert found.kind == "PAUSED"
    assert "rank 1 (pid 11)" in found.text


def test_short_waits_of_a_healthy_job_say_nothing_about_ranks() -> None:
    world = launched(rank(0, 2), rank(1, 2))

    def step(second: int) -> None:
        for number, one in enumerate(world.processes[1:]):
            one.main_cores = 0.5 if (second // 3 + number) % 2 else 0.0

    verdicts = play(world, 600, step=step)
    assert alarms(verdicts) == []
    assert not any(verdict.label.endswith("RANKS") and verdict.kind == "WAITING" for verdict in verdicts)


def test_processes_of_mp_spawn_are_ranks_in_the_order_of_their_start() -> None:
    def spawned(number: int, *, call: str) -> Proc:
        inside = (Frame(call, C10D, 3000),) if call else ()
        source = "dist.barrier()" if call else "lock.acquire()"
        return Proc(10 + number, ppid=5, source=source, inside=inside, outside=(Frame("_wrap", SPAWN, 90),))

    parent = Proc(5, wait=Wait("child"), source="mp.spawn(main, nprocs=2)")
    found = last(play(World([parent, spawned(0, call="barrier"), spawned(1, call="")]), WITHIN_S))
    assert (found.kind, found.pid) == ("STUCK", 11)
    assert found.text.startswith("rank 1 (pid 11) has not arrived")


def test_the_process_that_waits_in_mp_spawn_is_no_rank() -> None:
    def spawned(number: int) -> Proc:
        inside, outside = (Frame("recv", C10D, 2799),), (Frame("_wrap", SPAWN, 87),)
        return Proc(10 + number, ppid=5, source="dist.recv(x)", inside=inside, outside=outside, file="/me/t.py")

    joins = (
        Frame("ProcessContext.join", SPAWN, 140),
        Frame("start_processes", SPAWN, 296),
        Frame("spawn", SPAWN, 340),
    )
    parent = Proc(5, wait=Wait("pipe"), source="mp.spawn(main, nprocs=2)", inside=joins)
    found = last(play(World([parent, spawned(0), spawned(1)]), WITHIN_S))
    assert (found.kind, found.label) == ("STUCK", "STUCK_RANKS")
    assert found.text.startswith("all 2 ranks have stood in recv at /me/t.py:10 `dist.recv(x)` for ")
    assert ": each of them receives and none sends; " in found.text


@pytest.mark.parametrize(
    ("frames", "wait", "expected"),
    [
        ([("all_reduce", C10D)], "lock", "all_reduce"),
        ([("monitored_barrier", C10D), ("wrapper", C10D)], "network", "monitored_barrier"),
        (
            [("_engine_run_backward", "/v/site-packages/torch/autograd/graph.py")],
            "lock",
            "backward, where gradients are exchanged",
        ),
        ([("_engine_run_backward", "/v/site-packages/torch/autograd/graph.py")], "running", ""),
        ([], "lock", ""),
    ],
)
def test_the_collective_that_a_rank_is_in(frames: list[tuple[str, str]], wait: str, expected: str) -> None:
    proc = Proc(7, inside=tuple(Frame(function, file, 1) for function, file in frames))
    assert collective_at(proc.stack(), Wait(wait)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "ours", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, {}, RankPlace(3, 4, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, {}, RankPlace(2, 4, 0)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, {}, RankPlace(1, 2, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {}, None),
        ({"RANK": "9", "WORLD_SIZE": "4"}, {}, None),
        ({"RANK": "x", "WORLD_SIZE": "4"}, {}, None),
        ({}, {}, None),
        # A batch script has Slurm's variables already: what it starts inherits them and is no rank for that.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {"SLURM_PROCID": "0"}, None),
    ],
)
def test_launchers_tell_a_process_its_rank(
    environ: dict[str, str], ours: dict[str, str], expected: RankPlace | None
) -> None:
    assert rank_in(environ, ours) == expected


def test_a_ranks_workers_inherit_its_variables_and_are_no_ranks() -> None:
    make: Callable[..., Proc] = Proc
    shell = make(20, ppid=5, is_python=False, comm="bash", rank=RankPlace(1, 2, 1))
    python = make(21, ppid=20, rank=RankPlace(1, 2, 1))
    worker = make(22, ppid=21, rank=RankPlace(1, 2, 1))
    first = make(10, ppid=5, rank=RankPlace(0, 2, 0))
    found = ranks_among(one.reading() for one in (first, shell, python, worker))
    assert {number: reading.pid for number, reading in found.items()} == {0: 10, 1: 21}


def test_a_rendezvous_that_does_not_complete_says_what_to_do() -> None:
    folder = "/v/site-packages/torch/distributed"
    inside = (
        Frame("_delay", f"{folder}/elastic/rendezvous/utils.py", 181),
        Frame("next_rendezvous", f"{folder}/elastic/rendezvous/dynamic_rendezvous.py", 1166),
        Frame("main", f"{folder}/run.py", 1028),
    )
    thread = ThreadStack(5, "MainThread", inside, is_main=True)
    words = "torchrun --nnodes 2 --rdzv-endpoint 10.0.0.1:29500 train.py"
    assert meeting(ProcessStack(5, words, (thread,))) == (
        "waiting for the other machines of the job to join at 10.0.0.1:29500 (--nnodes 2)"
    )
    agent = Proc(5, comm="torchrun", inside=inside, wait=Wait("sleep"))
    found = last(play(World([agent]), 20))
    assert found.label == "WAITING_START"
    assert found.text.startswith(f"waiting for the other ranks of the job to start: {MEETING_HINT}")

    def meets(number: int) -> Proc:
        here = (Frame("_store_based_barrier", C10D, 900), Frame("init_process_group", C10D, 1700))
        place = RankPlace(number, 4, number)
        return Proc(
            10 + number, ppid=5, source="dist.init_process_group()", inside=here, rank=place, wait=Wait("sleep")
        )

    verdicts = play(launched(meets(0), meets(1)), 30)  # ranks 2 and 3 are on another machine
    assert "different shapes" not in last(verdicts).text
    assert last(verdicts).text.startswith("waiting for the other ranks of the job to start")


# -- several machines --------------------------------------------------------------------------------------------

FAR = FarRank(1, "demo-B", "waiting for other ranks (all_reduce)", "/me/train.py:13", True, 2.0)


def far_apart(far: FarRank | None) -> World:
    """One rank here, the other one on another machine, of which the supervisor there tells."""
    world = launched(rank(0, 2))
    world.elsewhere = None if far is None else (far,)
    return world


def test_ranks_of_two_machines_that_all_wait_are_cut_off_from_one_another() -> None:
    verdicts = play(far_apart(FAR), WITHIN_S)
    assert alarms(verdicts) == ["STUCK STUCK_RANKS"]
    assert last(verdicts).text.startswith(
        "all ranks wait for one another, here and on demo-B: the network between the machines is cut, or the ranks "
        "call with different shapes, dtypes or groups; rank 0 has waited for "
    )
    early = [verdict for verdict in verdicts if verdict.kind == "WAITING"]
    assert early and early[0].next_kind == "STUCK"  # named within seconds, with the alarm to come


def test_a_rank_that_works_on_another_machine_is_waited_for_however_long() -> None:
    busy = FarRank(1, "demo-B", "reading data", "/me/train.py:9", False, 2.0)
    verdicts = play(far_apart(busy), 300)
    assert alarms(verdicts) == []
    assert last(verdicts).text.startswith(
        "rank 1 on demo-B has not arrived: reading data at /me/train.py:9; rank 0 has"
    )
    two_here = launched(rank(0), rank(1))
    two_here.elsewhere = (FarRank(2, "demo-B", "reading data", "", False, 2.0),)
    assert alarms(play(two_here, 300)) == []


def test_a_machine_that_is_not_heard_of_is_named() -> None:
    silent = FarRank(1, "demo-B", "waiting for other ranks (all_reduce)", "", True, 70.0)
    found = last(play(far_apart(silent), WITHIN_S))
    assert found.kind == "STUCK"
    assert found.text.startswith("demo-B was last seen 1 min 10 s ago: that machine, or the network to it, is down; ")


def test_a_rank_that_moved_to_another_machine_has_not_ended() -> None:
    """After a machine was lost and came back, the ranks of a machine have other numbers."""
    world = far_apart(FarRank(1, "demo-B", "reading data", "", False, 2.0))
    world.processes.append(rank(1, 2))

    def renumber(second: int) -> None:
        if second == 1:
            world.processes.pop()

    assert alarms(play(world, 120, step=renumber)) == []


def test_what_is_sent_to_another_machine_and_not_acknowledged_names_a_cut_network_at_once() -> None:
    world = far_apart(None)
    world.tcp = 10_000_000  # of the seconds before

    def cut(second: int) -> None:
        if second == 4:
            world.tcp, world.silent = 0, ("10.77.0.2",)

    verdicts = play(world, 4 + WITHIN_S, step=cut)
    named = [second for second, one in enumerate(verdicts) if "the network between the machines is cut" in one.text]
    assert named[0] <= 4 + 3
    assert verdicts[named[0]].kind == "WAITING"
    assert verdicts[named[0]].text.startswith(
        "the network between the machines is cut, or 10.77.0.2 is down: what was sent there does not arrive; "
        "rank 0 has "
    )
    assert last(verdicts).kind == "STUCK"


def test_a_rank_that_computes_here_is_not_blamed_on_the_network() -> None:
    world = launched(rank(0), rank(1, call="", wait="running"))
    world.processes[2].main_cores, world.silent = 0.9, ("10.77.0.2",)
    assert "network" not in last(play(world, WITHIN_S)).text


def test_a_rank_elsewhere_whose_line_is_not_known_yet_does_not_hide_a_cut() -> None:
    unknown = FarRank(1, "demo-B", "python: waiting for a lock", "", False, 2.0)
    assert "the network between the machines is cut" in last(play(far_apart(unknown), WITHIN_S)).text

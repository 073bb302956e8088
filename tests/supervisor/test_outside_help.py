"""Healthy programs whose main thread waits for what comes from outside: a server, a signal, another process; and
processes that are held still by somebody else, by a frozen cgroup or by our own stack reader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jackline.diagnosis.frames import Frame, ProcessStack
from jackline.machine.readings import UNTIL_A_SIGNAL, Wait
from jackline.machine.waits import FROZEN
from jackline.supervisor.hang.deadlock import Deadlock, Member
from jackline.supervisor.hang.verdict import Judge, Sample, Verdict
from jackline.supervisor.stacks.inside import signal_inside
from jackline.supervisor.stacks.interrupts import would_cut_a_transfer
from jackline.supervisor.stacks.standing import read_standing
from jackline.supervisor.stacks.take import ask_faulthandler, native_text, sample_stacks
from tests.supervisor.hanging import hanging, wait_until
from tests.supervisor.worlds import Proc, World, alarms, first, gpu, play

GRPC = Frame("_next", "/v/site-packages/grpc/_channel.py", 9)
ENDLESS = Wait("lock", is_endless=True)


def hands_on_every(seconds: int, one: Proc, waits: Wait) -> object:
    """Every few seconds it runs for 0.1 ms after what it waited for, which is far too little to count as work."""

    def step(second: int) -> None:
        is_over = second % (2 * seconds) >= seconds
        one.wait = Wait("sleep") if is_over else waits
        one.main_cpu_s += 0.0001 * (second % seconds == 0)

    return step


@pytest.mark.parametrize("waits", [ENDLESS, Wait("sleep", UNTIL_A_SIGNAL, is_endless=True)])
def test_what_comes_again_and_again_is_movement(waits: Wait) -> None:
    player = Proc(8, 7)
    world = World([Proc(7, wait=Wait("child", is_endless=True)), player])
    assert alarms(play(world, 700, step=hands_on_every(20, player, waits))) == []


def test_what_never_comes_is_none() -> None:
    player = Proc(8, 7, wait=ENDLESS)
    assert alarms(play(World([Proc(7, wait=Wait("child", is_endless=True)), player]), 100)) == ["STUCK STUCK_CHILD"]


def test_a_child_that_works_after_each_sleep_may_sleep_longer_than_the_limit() -> None:
    child = Proc(8, 7, wait=Wait("sleep"))
    world = World([Proc(7, wait=Wait("child", is_endless=True)), child])

    def step(second: int) -> None:
        child.main_cpu_s += 0.02 * (second in (40, 80, 160, 240))

    assert alarms(play(world, 300, step=step)) == []


def test_a_child_that_never_woke_up_from_its_sleep_is_stuck() -> None:
    child = Proc(8, 7, wait=Wait("sleep"))
    assert alarms(play(World([Proc(7, wait=Wait("child", is_endless=True)), child]), 100)) == ["STUCK STUCK_CHILD"]


def test_a_process_that_is_ready_to_run_is_not_stuck() -> None:
    """It has slept nearly as long as is allowed, and on a busy machine waits for a CPU since."""
    child = Proc(8, 7, wait=Wait("sleep"))
    world = World([Proc(7, wait=Wait("child", is_endless=True)), child])

    def step(second: int) -> None:
        child.state, child.wait = ("R", Wait("running")) if second >= 58 else ("S", Wait("sleep"))
        child.main_cpu_s += 0.02 * (second == 66)

    assert alarms(play(world, 100, step=step)) == []


def stream(bytes_per_s: int) -> list[Verdict]:
    """A message each second: gRPC receives it in threads of its own, and wakes the main thread up for 0.1 ms."""
    main = Proc(7, inside=(GRPC,), main_cores=0.0001)
    return play(World([main], tcp=bytes_per_s), 700)


def test_a_stream_of_small_messages_is_no_hang() -> None:
    assert alarms(stream(150)) == []


def test_keep_alives_are_no_messages() -> None:
    assert alarms(stream(34)) == ["SUSPECT STUCK_NET"]


def server(task: str) -> list[Verdict]:
    """A web server with a timer: nothing but its timer runs, and a thread beside it works a little each second."""
    main = Proc(7, wait=Wait("network", "listening on 0.0.0.0:80"), main_cores=0.002, main_sleeps=10)
    world = World([main, Proc(8, 7, main_cores=0.004, main_sleeps=10)])
    judge = Judge()
    verdicts = []
    for second in range(700):
        main.wait = Wait("running") if second % 3 == 0 else Wait("network", "listening on 0.0.0.0:80")
        sample = world.sample(second)
        stacks = tuple(with_task(stack, task) for stack in sample.stacks or ()) or None
        verdicts.append(judge.add(replace(sample, stacks=stacks)))
        world.live()
    return verdicts


def with_task(stack: ProcessStack, task: str) -> ProcessStack:
    return replace(stack, tasks=(task,)) if stack.pid == 7 else stack


def test_a_server_without_clients_is_no_hang() -> None:
    assert alarms(server("task 'Task-1' awaits the end of a sleep at /v/uvicorn/server.py:9")) == []


def test_a_task_that_waits_beside_a_server_is_one() -> None:
    told = alarms(server("task 'Task-1' awaits a future at /me/train.py:9"))
    assert {words.partition(" ")[0] for words in told} == {"SUSPECT"}


def test_a_server_waits_longer_for_its_clients_than_others_may() -> None:
    waits = Wait("network", "listening on 0.0.0.0:80", is_endless=True)
    verdicts = play(World([Proc(7, wait=waits)]), 250)
    assert (alarms(verdicts), first(verdicts, "STUCK")) == (["STUCK STUCK_NET"], 240)


def test_a_frozen_cgroup_is_a_pause() -> None:
    world = World([Proc(7, wait=Wait("child")), Proc(8, 7, state="D", wait=FROZEN)])
    verdicts = play(world, 100)
    assert alarms(verdicts) == []
    assert verdicts[-1].text == (
        "paused (its cgroup is frozen): process 8 (python) at /me/p8.py:10 `with lock:`; the main thread (pid 7) is "
        "waiting for a child process at /me/p7.py:10 `with lock:`; it continues when its cgroup is thawed "
        "(docker unpause)"
    )


def test_our_own_stack_reader_is_no_debugger() -> None:
    """On a busy machine py-spy holds a process for seconds while it reads native stacks."""
    main = Proc(7)
    world, judge = World([main]), Judge()
    verdicts = []
    for second in range(100):
        is_held = 62 <= second < 70
        main.state, main.wait = ("t", Wait("stopped", "by a debugger")) if is_held else ("S", Wait("lock"))
        sample: Sample = replace(world.sample(second), disturbed=frozenset({7} if is_held else ()))
        verdicts.append(judge.add(sample))
        world.live()
    assert {verdict.kind for verdict in verdicts[61:]} == {"STUCK"}
    assert not any("debugger" in verdict.text for verdict in verdicts)


BACKLOG_FULL = """
import socket
path = "listens"
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen(0)
clients = []
while True:
    clients.append(socket.socket(socket.AF_UNIX))
    clients[-1].connect(path)  # HERE
    clients[-1].getpeername()  # raises where connect() had returned without a connection
"""


def test_a_process_in_connect_is_not_signalled(tmp_path: Path) -> None:
    """Python takes a connect() of a local socket that a signal has interrupted for a successful one."""
    with hanging(tmp_path, BACKLOG_FULL, waits="local_socket") as program:
        assert not signal_inside(program.pid, program.stacks)
        assert program.process.poll() is None


PARTLY_RECEIVED = """
import socket
ours, theirs = socket.socketpair()
theirs.sendall(b"head")
ours.recv(9, socket.MSG_WAITALL)  # HERE
"""
PARTLY_WRITTEN = """
import os
out, into = os.pipe()
os.write(into, bytes(200_000))  # HERE
"""
IN_A_THREAD = """
import socket, threading
ours, theirs = socket.socketpair()
theirs.sendall(b"head")
def fetch():
    os._exit(ours.recv(9, socket.MSG_WAITALL) != 9)
import os
threading.Thread(target=fetch).start()
threading.Event().wait()  # HERE
"""


@pytest.mark.parametrize(
    ("text", "waits"), [(PARTLY_RECEIVED, "local_socket"), (PARTLY_WRITTEN, "pipe")], ids=["recv", "write"]
)
def test_a_transfer_that_has_moved_a_part_is_not_cut(text: str, waits: str, tmp_path: Path) -> None:
    """A signal, or a debugger that holds the process for a moment, makes the call return what it has moved so far."""
    with hanging(tmp_path, text, waits=waits) as program:
        assert not signal_inside(program.pid, program.stacks)
        threads, why = ask_faulthandler(program.pid, program.stacks, limit_s=1.0)
        assert threads == () and why.startswith("not asked")
        (stack,) = sample_stacks([program.pid], stacks_folder=program.stacks, native=True)
        assert stack.main is not None and stack.main.frames[0].line == program.line()
        assert native_text([program.pid]) == ""
        assert program.process.poll() is None
        assert read_standing([program.pid], program.stacks).threads[0].place == f"{program.script}:{program.line()}"


def test_no_debugger_cuts_a_transfer_of_another_thread(tmp_path: Path) -> None:
    with hanging(tmp_path, IN_A_THREAD, waits="lock") as program:
        wait_until(lambda: would_cut_a_transfer(program.pid), "the thread's call")
        sample_stacks([program.pid], stacks_folder=program.stacks, native=True)
        assert program.process.poll() is None


# -- a deadlock beside the main thread -----------------------------------------------------------------------------

CYCLE = Deadlock((Member(7, 71, "thread 'a'", "lock 'b'", "/me/p7.py:3"),), True, "they wait for each other", False)


def beside(main: Proc, *, counts: bool, prints: bool) -> list[str]:
    """Two threads have locked each other out; the main thread does not need them."""

    class Proved(World):
        def sample(self, second: int) -> Sample:
            found = super().sample(second)
            processes = tuple(replace(one, threads=((7, second), (71, 5))) for one in found.tree.processes)
            tree = replace(found.tree, processes=processes)
            return replace(found, tree=tree, was_asked=True, deadlock=CYCLE)

    world = Proved([main])

    def step(_second: int) -> None:
        world.marks += counts
        world.output_bytes += 20 * prints

    return alarms(play(world, 200, step=step))


def test_a_main_thread_that_counts_steps_is_not_stuck_for_threads_beside_it() -> None:
    assert beside(Proc(7, main_cores=0.01), counts=True, prints=True) == []


def test_words_of_a_main_thread_that_stands_are_no_steps() -> None:
    assert beside(Proc(7, main_writes=20), counts=False, prints=True)[-1:] == ["STUCK DEADLOCK"]


# -- a GPU that hangs ----------------------------------------------------------------------------------------------


def test_a_hung_kernel_is_told_before_it_is_suspect() -> None:
    idle, spins = gpu(), gpu(utilisation_percent=100)
    world = World([Proc(7, state="R", wait=Wait("running"), source="loss.item()", main_cores=1.0)], gpus=(idle,))

    def step(second: int) -> None:
        world.gpus = (spins if second >= 5 else idle,)

    verdicts = play(world, 80, step=step)
    assert {(verdict.kind, verdict.label) for verdict in verdicts[11:64]} == {("BUSY", "GPU_SPIN")}
    assert verdicts[20].text == (
        "the GPU shows full use but has touched no memory and drawn idle power for 15 s at /me/p7.py:10 "
        "`loss.item()`; if nothing changes, SUSPECT in 45 s"
    )
    assert alarms(verdicts) == ["SUSPECT GPU_SPIN"]

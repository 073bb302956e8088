"""Programs that a third author wrote, as hand-made process trees: what was first said about them was wrong."""

from __future__ import annotations

from dataclasses import replace

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.machine.readings import Wait
from jackline.supervisor.hang.text import view_text
from jackline.supervisor.hang.verdict import Judge, Verdict
from jackline.supervisor.hang.views import new_view
from tests.supervisor.worlds import Proc, World, alarms, first, play

TRIES = (
    Frame("BaseFileLock._poll_until_acquired", "/site-packages/filelock/_api.py", 1112, "time.sleep(delay)"),
    Frame("BaseFileLock.__enter__", "/site-packages/filelock/_api.py", 1201, "self.acquire()"),
)
TRYING = (
    Frame("UnixFileLock._acquire", "/site-packages/filelock/_unix.py", 61, "fcntl.flock(fd, flags)"),
    *TRIES,
)


def tries_a_lock(cpu_per_s: tuple[float, ...]) -> tuple[World, object]:
    """20 tries a second; the CPU time of each second is uneven, as on a busy machine."""
    process = Proc(7, wait=Wait("sleep"), main_sleeps=20.0, inside=TRIES, source="with FileLock(path):")

    def step(second: int) -> None:
        process.main_cores = cpu_per_s[second % len(cpu_per_s)]
        process.inside = TRYING if second % 10 < 5 else TRIES

    return World([process]), step


def test_the_tries_of_a_file_lock_are_no_work() -> None:
    world, step = tries_a_lock((0.004, 0.005, 0.016, 0.004, 0.021))
    verdicts = play(world, 320, step=step)
    assert first(verdicts, "SUSPECT") == 241
    holder = Proc(8, ppid=7, wait=Wait("sleep", is_endless=True))
    world.processes.append(holder)
    assert alarms(play(world, 320, step=step)) == ["STUCK STUCK_LOCK"]
    assert verdicts[100].text.startswith("waiting for a file lock that another process or another part of this one")
    assert "; nothing has moved for 1 min 39 s; if nothing changes, SUSPECT in " in verdicts[100].text


def test_work_between_two_file_locks_is_work() -> None:
    world, step = tries_a_lock((0.004, 0.005, 0.2, 0.004, 0.005))
    assert alarms(play(world, 320, step=step)) == []


ASKS = Wait("keyboard", "/dev/pts/3", 0, is_endless=True)
READS = Wait("pipe", "the program in /dev/pts/3", 5, is_endless=True)


def test_a_question_to_a_program_that_waits_for_other_words_is_stuck() -> None:
    """pexpect waits for "password:", and ssh has asked "yes/no?": nobody else can type in that terminal."""
    asking = Proc(8, ppid=7, comm="ssh", is_python=False, wait=ASKS)
    verdicts = play(World([Proc(7, wait=READS, source='shell.expect("password:")'), asking]), 70)
    assert (first(verdicts, "STUCK"), alarms(verdicts)) == (61, ["STUCK STUCK_CHILD"])
    assert verdicts[61].text == (
        "nothing has moved for 1 min: process 8 (ssh) waits for input in the terminal /dev/pts/3, which process 7 "
        '(python) has made; that one waits for more output at /me/p7.py:10 `shell.expect("password:")`: they wait '
        "for each other"
    )


def test_a_question_to_a_program_that_may_still_answer_is_no_alarm_about_a_keyboard() -> None:
    asking = Proc(8, ppid=7, comm="ssh", is_python=False, wait=ASKS)
    limited = replace(READS, is_endless=False, lasts_s=300.0)
    verdicts = play(World([Proc(7, wait=limited), asking]), 70)
    assert alarms(verdicts) == []
    assert verdicts[-1].text.endswith("; process 7 (python) has made the terminal /dev/pts/3 and could answer")
    elsewhere = replace(READS, target="the program in /dev/pts/4")
    verdicts = play(World([Proc(7, wait=elsewhere), asking]), 50)
    assert verdicts[-1].text.endswith("; it can be answered in the terminal /dev/pts/3")


def test_a_server_beside_a_program_that_sleeps_again_and_again_changes_nothing() -> None:
    """A TensorBoard, started by the training that it shows: nobody waits for it."""

    def lives(*beside: Proc) -> list[Verdict]:
        trainer = Proc(7, wait=Wait("sleep"), main_cores=0.0002, main_sleeps=0.25, source="time.sleep(4)")
        return play(World([trainer, *beside]), 300)

    board = Proc(8, ppid=7, wait=Wait("network", "listening on 127.0.0.1:6006", is_endless=True))
    assert (first(lives(), "SUSPECT"), first(lives(), "STUCK")) == (240, -1)
    assert (first(lives(board), "SUSPECT"), first(lives(board), "STUCK")) == (240, -1)
    assert first(lives(Proc(8, ppid=7, wait=Wait("lock", is_endless=True))), "STUCK") == 60


def test_the_server_of_a_library_waits_for_clients_as_long_as_they_like() -> None:
    serving = Frame("BaseServer.serve_forever", "/usr/lib/python3.11/socketserver.py", 232, "selector.select()")
    waits = Wait("network", "listening on 0.0.0.0:80", lasts_s=0.5)
    program = Proc(7, wait=waits, main_cores=0.0001, main_sleeps=2.0)
    assert first(play(World([program]), 1000), "SUSPECT") == 480, "a loop of one's own waits for somebody to connect"
    program = replace(program, inside=(serving,))

    def step(second: int) -> None:  # seen between two waits now and then
        program.wait = Wait("running") if second % 7 == 0 else waits

    assert alarms(play(World([program]), 1000, step=step)) == []


def test_a_worker_that_computes_is_told_with_its_line() -> None:
    waiting = Proc(7, wait=Wait("pipe"), source="for n in pool.imap(tokenise, files):")
    worker = Proc(8, ppid=7, main_cores=0.9, wait=Wait("running"), line=40, source="rows.sort()")
    judge, world = Judge(), World([waiting, worker])
    for second in range(20):
        found = judge.add(world.sample(second))
        world.live()
    assert (found.kind, found.label) == ("BUSY", "WAITING_CHILD")
    assert "while process 8 (python) works at /me/p8.py:40 `rows.sort()` (0.9 cores)" in found.text
    assert judge.at_work() == "process 8 (python) works at p8.py:40"
    worker.main_cores, worker.wait = 0.0, Wait("lock")
    for second in range(20):
        judge.add(world.sample(second))
        world.live()
    assert judge.at_work() == ""


def managers(file: str) -> str:
    return f"/usr/lib/python3.11/multiprocessing/{file}.py"


def test_the_server_of_a_manager_is_told_by_the_calls_that_wait_in_it() -> None:
    def call(tid: int, name: str, *inner: Frame) -> ThreadStack:
        serving = Frame("Server.serve_client", managers("managers"), 273, "res = function(*args, **kwds)")
        return ThreadStack(tid, name, (*inner, serving), wait="lock" if not inner else "local_socket")

    recv = Frame("Connection._recv", managers("connection"), 395, "chunk = read(handle, remaining)")
    frames = (
        Frame("Event.wait", "/usr/lib/python3.11/threading.py", 629, "signaled = self._cond.wait(timeout)"),
        Frame("BaseManager._run_server", managers("managers"), 600, "server.serve_forever()"),
    )
    threads = (call(9, "Process-3"), call(10, "MainProcess"), call(11, "Process-4", recv))
    stack = ProcessStack(8, "python", (ThreadStack(8, "MainThread", frames, True, "lock"), *threads))
    view = replace(new_view(Proc(8).reading(), 0.0), stack=stack)
    assert view_text(view) == "is serving, and in it the call of 'Process-3' and of 'MainProcess' waits for a lock"
    idle = replace(stack, threads=(stack.threads[0], threads[2]))
    assert view_text(replace(view, stack=idle)).startswith("is waiting for a signal of another thread")


def test_what_a_rescue_of_a_hang_does_is_no_movement() -> None:
    """The process is asked to save its state: a thread of ours starts there, and so does a writer."""
    stuck = Proc(7, wait=Wait("lock", is_endless=True))
    writer = Proc(8, ppid=7, wait=Wait("running"), main_cores=0.5)
    world, judge, verdicts = World([stuck]), Judge(), []
    for second in range(120):
        is_saving = 62 <= second < 70
        stuck.other_cores, stuck.disk = (0.4, 1 << 20) if is_saving else (0.0, 0)
        stuck.num_threads = 5 if is_saving else 4
        world.processes = [stuck, writer] if second >= 62 else [stuck]
        if second >= 66:
            writer.state, writer.wait, writer.main_cores = "Z", Wait("zombie"), 0.0
        rescued = frozenset({7}) if 62 <= second <= 70 else frozenset()
        verdicts.append(judge.add(replace(world.sample(second), rescued=rescued)))
        world.live()
    assert {verdict.kind for verdict in verdicts[60:]} == {"STUCK"}
    assert "process 8" not in verdicts[-1].text
    stuck.line += 10
    for second in range(120, 125):
        verdicts.append(judge.add(world.sample(second)))
        world.live()
    assert verdicts[-1].kind != "STUCK", "what it does later is its own"

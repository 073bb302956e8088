"""Programs that a third author wrote, as hand-made process trees: what was first said about them was wrong."""

from __future__ import annotations

from dataclasses import replace

from jackline.diagnosis.frames import Frame
from jackline.machine.readings import Wait
from jackline.supervisor.hang.verdict import Verdict
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
    assert first(verdicts, "STUCK") != -1 or first(verdicts, "SUSPECT") != -1, alarms(verdicts)
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

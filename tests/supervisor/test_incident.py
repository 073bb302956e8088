"""The incident file and what it says of locks."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack
from jackline.machine.proc import read_tree
from jackline.machine.readings import ProcessReading, TreeReading, Wait
from jackline.supervisor.hang.deadlock import Deadlock, Member
from jackline.supervisor.hang.incident import advice, incident_text, stack_lines, steps_in, write_incident
from jackline.supervisor.hang.lock_cycle import explain_locks, held_around, wanted_at
from jackline.supervisor.hang.verdict import Verdict
from jackline.supervisor.stacks.take import sample_stacks
from tests.supervisor.hanging import LOCK_ABBA, hanging, wait_until

VERDICT = Verdict("STUCK", "STUCK_LOCK", 5.0, "nothing has moved for 1 min: ...", None, 7)
MAIN = ThreadStack(
    7,
    "MainThread",
    (
        Frame("wait", "/usr/lib/python3.11/threading.py", 320, "waiter.acquire()"),
        Frame("step", "/me/train.py", 41, "with lock:", True),
    ),
    True,
    "lock",
)


def reading(pid: int, **more: object) -> ProcessReading:
    settings: dict[str, object] = {
        "pid": pid,
        "ppid": 1,
        "start_ticks": 1,
        "comm": "python",
        "state": "S",
        "cpu_s": 12.34,
        "wants_cpu_s": 13.0,
        "rss_bytes": 310 << 20,
        "num_threads": 4,
        "read_bytes": 0,
        "write_bytes": 0,
        "wait": Wait("lock"),
        **more,
    }
    return ProcessReading(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("waits", "text", "step"),
    [
        ([("lock 'a'", "lock 'b'"), ("lock 'b'", "lock 'a'")], "they wait for each other", "in the same order"),
        ([("lock 'a'", "")], "thread 'filler' that took it has ended without giving it back", "with `with`"),
        ([("lock 'a'", "")], "nobody is left", "take the lock with `with`"),
        ([("an item of a queue that is empty", "")], "nobody is left", "who should put, set, notify or finish it"),
        ([("an item of a queue that is empty", "")], "thread 'r' has ended with OSError", "mend first"),
        ([("the result of a future", "")], "all 2 threads of that pool wait", "a pool of their own"),
        ([("data from a pipe", "")], "nobody is left", "close the ends that are not used"),
        (
            [("data from a local socket", "")],
            "its child, has exited with code 0",
            "close the child's end of the pipe",
        ),
        ([("task 'a' of its event loop, which awaits a signal (Event)", "")], "nobody is left", "put, set, notify"),
        ([("lock 'a'", "")], "process 8 was forked from process 7 while", "'spawn' instead of 'fork'"),
    ],
)
def test_the_advice_for_a_deadlock_is_about_what_its_members_wait_for(
    waits: list[tuple[str, str]], text: str, step: str
) -> None:
    members = tuple(Member(7, 7, "the main thread", wait, "a.py:1", holds) for wait, holds in waits)
    verdict = Verdict("STUCK", "DEADLOCK", 5.0, text, None, 7, deadlock=Deadlock(members, False, text, True))
    steps = steps_in(incident_text(verdict, (), TreeReading(1.0, ()), 0.0))
    assert step in steps[0] and not any("samples the stacks again" in one for one in steps)


def test_the_whole_text_of_an_incident() -> None:
    stacks = (
        ProcessStack(7, "python train.py", (MAIN,), "py-spy"),
        ProcessStack(8, "cc1plus x.cu", (ThreadStack(8, "cc1plus", (), True, "running"),), "proc"),
        ProcessStack(0, "", problem="3 more processes were not looked at"),
    )
    tree = TreeReading(1.0, (reading(7), reading(8, ppid=7, comm="cc1plus", num_threads=1, wait=Wait("running"))))
    assert incident_text(VERDICT, stacks, tree, 0.0, "thread 7\n    futex_wait\n") == (
        "STUCK (STUCK_LOCK) at 1970-01-01 00:00:00 UTC\n"
        "\n"
        "nothing has moved for 1 min: ...\n"
        "\n"
        "What to do next\n"
        "  - look at the lines above for a lock that its holder never lets go: a thread that died, a fork while a "
        "thread held it, two locks taken in different order\n"
        "  - `jackline why` samples the stacks again; `jackline stop` saves and ends it\n"
        "\n"
        "Processes (2)\n"
        "  pid 7 (parent 1)  S  CPU 12.3 s  310 MiB  4 threads  waiting for a lock  python train.py\n"
        "  pid 8 (parent 7)  S  CPU 12.3 s  310 MiB  1 thread  running  cc1plus x.cu\n"
        "\n"
        "Stacks, innermost line first; > marks your own code\n"
        "\n"
        "process 7: python train.py, read by py-spy\n"
        "  main thread 'MainThread' (7), lock\n"
        "    /usr/lib/python3.11/threading.py:320 in wait    waiter.acquire()\n"
        "  > /me/train.py:41 in step    with lock:\n"
        "\n"
        "process 8: cc1plus x.cu, read by proc\n"
        "  main thread 'cc1plus' (8), running\n"
        "\n"
        "(3 more processes were not looked at)\n"
        "\n"
        "Native stacks\n"
        "\n"
        "thread 7\n"
        "    futex_wait\n"
    )


@pytest.mark.parametrize(
    "label", ["STUCK", "STUCK_NET", "STUCK_CHILD", "STUCK_DISK", "STOPPED", "KEYBOARD", "GPU_SPIN", "SLEEPING"]
)
def test_every_label_has_its_own_advice(label: str) -> None:
    lines = advice(Verdict("STUCK", label, 0.0, ""))
    assert len(lines) >= 2
    assert lines[0] != advice(VERDICT)[0]


def test_only_own_lines_and_the_innermost_are_shown_when_short() -> None:
    deep = ThreadStack(7, "T", (*MAIN.frames, Frame("run", "/usr/lib/python3.11/threading.py", 900)))
    assert list(stack_lines(ProcessStack(7, "x", (deep,)), only_user=True)) == [
        "process 7: x",
        "  thread 'T' (7)",
        "    /usr/lib/python3.11/threading.py:320 in wait    waiter.acquire()",
        "  > /me/train.py:41 in step    with lock:",
    ]


def test_a_real_deadlock_is_explained_in_the_file(tmp_path: Path) -> None:
    with hanging(tmp_path, LOCK_ABBA, waits="lock") as program:
        here, there = program.line(), program.line("THERE")

        def both_wait() -> tuple[ProcessStack, ...] | None:
            stacks = sample_stacks([program.pid], stacks_folder=program.stacks)
            lines = {frame.line for thread in stacks[0].threads for frame in thread.frames}
            return stacks if {here, there} <= lines else None

        stacks = wait_until(both_wait, "both threads at their locks")
        path = tmp_path / "incident-1.txt"
        write_incident(path, verdict=VERDICT, stacks=stacks, tree=read_tree(program.pid), now_s=time.time())
        text = path.read_text()
    script = program.script
    assert (
        f"  - the main thread holds 'first' and waits for 'second' at {script}:{here}; "
        f"thread 'other' holds 'second' and waits for 'first' at {script}:{there}: they wait for each other for "
        "ever; take both locks in the same order everywhere\n"
    ) in text
    assert f"  > {script}:{here} in <module>    with second:  # HERE\n" in text
    assert f"  > {script}:{there} in other    with first:  # THERE\n" in text
    assert sorted(entry.name for entry in tmp_path.glob("*incident*")) == ["incident-1.txt"]


# -- locks ----------------------------------------------------------------------------------------------------------

SOURCE = """
def save(self):
    with self.lock:
        flush()

def step(self):
    with self.lock, open("x"):
        save(self)

def take(a, b):
    a.acquire()
    b.acquire(
        timeout=5)
"""


def test_what_a_line_wants_and_what_is_held_around_it() -> None:
    tree = ast.parse(SOURCE)
    assert wanted_at(tree, 3) == "self.lock"
    assert wanted_at(tree, 4) == ""
    assert wanted_at(tree, 13) == "b"
    assert held_around(tree, 8) == ["self.lock", "open('x')"]
    assert held_around(tree, 3) == []


def thread(name: str, *lines: int, wait: str = "lock", file: str = "/me/x.py") -> ThreadStack:
    frames = tuple(Frame("f", file, line, "text", True) for line in lines)
    return ThreadStack(1, name, frames, name == "main", wait)


def test_a_lock_taken_twice_by_one_thread_is_named() -> None:
    assert explain_locks([thread("main", 3, 8)], lambda file: SOURCE) == [
        "the main thread waits at /me/x.py:3 for 'self.lock', which it holds already: a plain Lock cannot be taken "
        "twice by one thread; threading.RLock can"
    ]


def test_threads_that_wait_for_locks_without_evidence_are_only_listed() -> None:
    assert explain_locks([thread("main", 3), thread("w", 12)], lambda file: SOURCE) == [
        "several threads wait for locks and may wait for each other: the main thread for 'self.lock' at /me/x.py:3, "
        "thread 'w' for 'b' at /me/x.py:12"
    ]


@pytest.mark.parametrize(
    "threads",
    [
        pytest.param([thread("main", 3, wait="network")], id="waits for something else"),
        pytest.param([thread("main", 4)], id="wants no lock that its line names"),
        pytest.param([thread("main")], id="no own code"),
        pytest.param([], id="no thread"),
    ],
)
def test_nothing_is_said_without_evidence(threads: list[ThreadStack]) -> None:
    assert explain_locks(threads, lambda file: SOURCE) == []


@pytest.mark.parametrize("text", [None, "def broken(:\n", "\0"])
def test_a_source_that_cannot_be_read_explains_nothing(text: str | None) -> None:
    assert explain_locks([thread("main", 3, 8), thread("w", 12)], lambda file: text) == []


def test_the_advice_about_a_child_is_made_from_what_the_child_waits_for() -> None:
    verdict = Verdict("STUCK", "STUCK_CHILD", 5.0, "nothing has moved for 1 min: ...", None, 8)
    endless = Wait("lock", is_endless=True)

    def advised(child: ProcessReading, role: str = "", native_text: str = "") -> tuple[str, ...]:
        stacks = (ProcessStack(7, "python train.py"), ProcessStack(8, "python train.py", role=role))
        return advice(verdict, stacks, TreeReading(1.0, (reading(7), child)), native_text)[1:-1]

    assert advised(reading(8, ppid=7)) == ()
    assert advised(reading(8, ppid=7), role="DataLoader worker 1")[0].startswith("with a DataLoader: ")
    far = reading(8, ppid=7, comm="git-remote-http", wait=Wait("network", "10.0.0.3:443"))
    assert advised(far) == (
        "process 8 (git-remote-http) waits for a far end that does not answer (10.0.0.3:443): give it a timeout",
    )
    inside = (
        'process 7\nThread 7 (idle)\n    read (libc.so.6)\nprocess 8\nProcess 8: python\n\nThread 8 (idle): "Main"\n'
        "    0x7f5e7fa1e073 (libgomp.so.1)\n    sgemm_ (libtorch_cpu.so)\n"
    )
    (words,) = advised(reading(8, ppid=7, num_threads=1, wait=endless), native_text=inside)
    assert words.startswith(
        "process 8 waits in libgomp.so.1 for other threads, and it has none: a fork does not take"
    )
    assert advised(reading(8, ppid=7, num_threads=3, wait=endless), native_text=inside) == ()
    assert advised(reading(8, ppid=7, num_threads=1), native_text=inside) == ()


def test_the_advice_about_a_file_lock_is_how_to_find_its_holder() -> None:
    words = (
        "nothing has moved for 1 min: the main thread (pid 7) is waiting for a file lock that another process holds"
    )
    assert advice(Verdict("STUCK", "STUCK_LOCK", 5.0, words, None, 7))[0].startswith(
        "`lsof FILE` or /proc/locks names"
    )
    words = "the main thread (pid 7) is waiting for file lock '/a/hub.lock', held by process 9 (python x.py)"
    assert advice(Verdict("STUCK", "STUCK_LOCK", 5.0, words, None, 7))[0].startswith("let the process that holds")

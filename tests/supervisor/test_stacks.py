"""Stacks of real processes, by every way there is; and the two text formats."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack, innermost_user_frame
from jackline.machine.proc import catches_signal, read_process
from jackline.supervisor.child.environment import STACK_SIGNAL
from jackline.supervisor.stacks import sources
from jackline.supervisor.stacks import take as stacks
from jackline.supervisor.stacks.dumps import fatal_part, is_own_code, parse_faulthandler, parse_py_spy
from jackline.supervisor.stacks.sources import SourceReader
from jackline.supervisor.stacks.take import forget_dead, main_hash, native_text, others_hash, sample_stacks
from tests.supervisor.hanging import (
    FORK_DEADLOCK,
    GIL_IN_C,
    LOCK_ABBA,
    REGEX,
    SLEEP_LOOP,
    SOCKET_RECV,
    STOPPED_WORKER,
    Hanging,
    hanging,
    running,
    wait_until,
)

PLACES = [
    pytest.param(LOCK_ABBA, "lock", "with second:  # HERE", id="lock"),
    pytest.param(SOCKET_RECV, "network", "connection.recv(10)  # HERE", id="socket"),
    pytest.param(GIL_IN_C, "sleep", "ctypes.PyDLL(None).sleep(10_000)  # HERE", id="gil-held-in-c"),
    pytest.param(REGEX, "", 're.match(r"(a+)+$", "a" * 60 + "b")  # HERE', id="regex"),
    pytest.param(SLEEP_LOOP, "sleep", "time.sleep(0.05)  # HERE", id="sleep-loop"),
]


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without py-spy, or one where it may not look into processes."""
    monkeypatch.setattr(stacks, "find_tool", lambda name: None)


def needs_ptrace() -> None:
    probe = sample_stacks([os.getpid()], stacks_folder=None)[0]
    if probe.method != "py-spy":
        pytest.skip(f"py-spy cannot look into processes here: {probe.problem}")


def stack_at(program: Hanging, source: str, folder: Path | None) -> ProcessStack:
    """Sample until the main thread is seen at the line; a program needs a moment to get there."""

    def sampled() -> ProcessStack | None:
        (stack,) = sample_stacks([program.pid], stacks_folder=folder)
        frame = innermost_user_frame(stack.main)
        return stack if frame is not None and frame.source == source else None

    return wait_until(sampled, f"the line {source}")


@pytest.mark.parametrize(("text", "waits", "source"), PLACES)
def test_py_spy_names_the_line_and_its_text(text: str, waits: str, source: str, tmp_path: Path) -> None:
    needs_ptrace()
    with hanging(tmp_path, text, waits=waits) as program:
        stack = stack_at(program, source, None)
        frame = innermost_user_frame(stack.main)
        assert (stack.method, stack.problem) == ("py-spy", "")
        assert frame is not None
        assert (frame.file, frame.line, frame.is_user) == (str(program.script), program.line(), True)
        assert stack.main is not None
        assert (stack.main.thread_id, stack.main.is_main) == (program.pid, True)


@pytest.mark.parametrize(("text", "waits", "source"), [entry for entry in PLACES if entry.id != "gil-held-in-c"])
@pytest.mark.usefixtures("no_py_spy")
def test_the_injected_handler_names_the_line_where_py_spy_cannot(
    text: str, waits: str, source: str, tmp_path: Path
) -> None:
    with hanging(tmp_path, text, waits=waits) as program:
        stack = stack_at(program, source, program.stacks)
        frame = innermost_user_frame(stack.main)
        assert stack.method == "faulthandler"
        assert frame is not None
        assert (frame.file, frame.line) == (str(program.script), program.line())
        assert program.process.poll() is None


@pytest.mark.usefixtures("no_py_spy")
def test_the_injected_handler_answers_while_c_code_holds_the_interpreter(tmp_path: Path) -> None:
    # A signal ends a C sleep, so this one begins again and again, always with the lock held.
    text = GIL_IN_C.replace("ctypes.PyDLL", "while True: ctypes.PyDLL")
    with hanging(tmp_path, text, waits="sleep") as program:
        stack = stack_at(program, "while True: ctypes.PyDLL(None).sleep(10_000)  # HERE", program.stacks)
        assert stack.method == "faulthandler"


@pytest.mark.parametrize("version", ["3.7", "3.9", "3.12", "3.13"])
@pytest.mark.parametrize("way", ["py-spy", "faulthandler"])
def test_other_pythons_are_read_too(version: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}*/bin/python"))
    if not found:
        pytest.skip(f"Python {version} is not installed here")
    if way == "py-spy":
        needs_ptrace()
    else:
        monkeypatch.setattr(stacks, "find_tool", lambda name: None)
    with hanging(tmp_path, LOCK_ABBA, waits="lock", python=str(found[0])) as program:
        stack = stack_at(program, "with second:  # HERE", program.stacks)
        frame = innermost_user_frame(stack.main)
        assert stack.method == way
        assert frame is not None and frame.line == program.line()


def test_both_ways_agree_on_where_the_main_thread_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_ptrace()
    with hanging(tmp_path, LOCK_ABBA, waits="lock") as program:
        by_spy = stack_at(program, "with second:  # HERE", program.stacks)
        monkeypatch.setattr(stacks, "find_tool", lambda name: None)
        by_signal = stack_at(program, "with second:  # HERE", program.stacks)
    assert (by_spy.method, by_signal.method) == ("py-spy", "faulthandler")
    assert main_hash(by_spy) == main_hash(by_signal) != ""


def test_every_thread_has_its_name_and_what_it_waits_on(tmp_path: Path) -> None:
    needs_ptrace()
    with hanging(tmp_path, LOCK_ABBA, waits="lock") as program:
        stack = stack_at(program, "with second:  # HERE", None)

        def other() -> ThreadStack | None:
            (seen,) = sample_stacks([program.pid], stacks_folder=None)
            found = next((thread for thread in seen.threads if thread.name == "other"), None)
            return found if found and found.frames[0].line == program.line("THERE") else None

        thread = wait_until(other, "the other thread")
    assert thread.wait == "lock"
    assert not thread.is_main
    assert stack.threads[0].name == "MainThread"


def test_a_stopped_worker_is_read_too(tmp_path: Path) -> None:
    needs_ptrace()
    with hanging(tmp_path, STOPPED_WORKER, waits="local_socket") as program:
        worker = wait_until(lambda: _stopped_child(program), "a stopped worker")
        main, stopped = sample_stacks([program.pid, worker], stacks_folder=program.stacks)
        frame = innermost_user_frame(stopped.main)
        assert (main.pid, stopped.pid) == (program.pid, worker)
        assert frame is not None and frame.line == program.line("THERE")
        assert stopped.main is not None and stopped.main.wait == "stopped"


def _stopped_child(program: Hanging) -> int | None:
    children = [read_process(pid) for pid in program.pids()[1:]]
    return next((child.pid for child in children if child and child.state == "T"), None)


@pytest.mark.usefixtures("no_py_spy")
def test_a_stopped_process_is_not_signalled_and_says_what_is_known(tmp_path: Path) -> None:
    with hanging(tmp_path, "import time\ntime.sleep(1000)", waits="sleep") as program:
        os.kill(program.pid, signal.SIGSTOP)
        wait_until(lambda: program.wait_kind() == "stopped", "the stop")
        (stack,) = sample_stacks([program.pid], stacks_folder=program.stacks)
        os.kill(program.pid, signal.SIGCONT)
        wait_until(lambda: program.wait_kind() == "sleep", "continuing")
        assert stack.method == "proc"
        assert stack.problem == "py-spy is not installed; a stopped process runs no handler"
        assert stack.main is not None and stack.main.wait == "stopped"
        assert (program.stacks / f"fh.{program.pid}").read_text() == ""


def test_a_forked_worker_that_deadlocked_is_named(tmp_path: Path) -> None:
    needs_ptrace()
    with hanging(tmp_path, FORK_DEADLOCK, waits="child") as program:
        worker = wait_until(lambda: program.pids()[1:], "the worker")[0]
        wait_until(lambda: (read_process(worker) or 0) and read_process(worker).wait.kind == "lock", "its lock")  # type: ignore[union-attr]
        _, stack = sample_stacks([program.pid, worker], stacks_folder=None)
        frame = innermost_user_frame(stack.main)
        assert frame is not None and frame.line == program.line("THERE")


@pytest.mark.usefixtures("no_py_spy")
def test_a_process_without_our_handler_is_never_signalled(tmp_path: Path) -> None:
    with hanging(tmp_path, "import time\ntime.sleep(1000)", waits="sleep", inject=False) as program:
        assert not catches_signal(program.pid, STACK_SIGNAL)
        (program.stacks / f"fh.{program.pid}").write_text("")  # as if it had been there before an exec
        (stack,) = sample_stacks([program.pid], stacks_folder=program.stacks)
        assert stack.method == "proc"
        assert stack.problem == "py-spy is not installed; signal 61 is not armed there"
        assert program.process.poll() is None


@pytest.mark.usefixtures("no_py_spy")
def test_a_process_that_closed_its_dump_file_is_not_signalled(tmp_path: Path) -> None:
    text = "import os, time\nos.closerange(3, 4096)\ntime.sleep(1000)"
    with hanging(tmp_path, text, waits="sleep") as program:
        assert catches_signal(program.pid, STACK_SIGNAL)
        (stack,) = sample_stacks([program.pid], stacks_folder=program.stacks)
        assert (stack.method, stack.main is not None and stack.main.wait) == ("proc", "sleep")


def test_a_program_that_is_not_python_shows_its_wait() -> None:
    with running(["sleep", "1000"]) as process:
        wait_until(lambda: _kind(process.pid) == "sleep", "sleep")
        (stack,) = sample_stacks([process.pid], stacks_folder=None)
    assert (stack.command, stack.method, stack.problem) == ("sleep 1000", "proc", "")
    assert [(thread.name, thread.wait, thread.is_main) for thread in stack.threads] == [("sleep", "sleep", True)]
    assert main_hash(stack) == ""


def _kind(pid: int) -> str:
    process = read_process(pid)
    return process.wait.kind if process else ""


def test_a_process_that_is_gone_is_said_to_be_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert sample_stacks([process.pid], stacks_folder=None) == (
        ProcessStack(process.pid, "", (), "", "the process is gone"),
    )


def test_at_most_sixteen_are_looked_at_and_the_rest_is_counted() -> None:
    sleepers = [subprocess.Popen(["sleep", "1000"]) for _ in range(20)]
    try:
        found = sample_stacks([sleeper.pid for sleeper in sleepers], stacks_folder=None)
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    assert len(found) == 17
    assert found[-1] == ProcessStack(0, "", problem="4 more processes were not looked at")


def test_native_stacks_name_the_c_function(tmp_path: Path) -> None:
    needs_ptrace()
    with hanging(tmp_path, LOCK_ABBA, waits="lock") as program:
        stack_at(program, "with second:  # HERE", None)
        (stack,) = sample_stacks([program.pid], stacks_folder=None, native=True, deadline_s=20)
        text = native_text([program.pid])
        assert stack.main is not None
        assert stack.main.frames[0].is_user is False
        assert any("lock" in frame.function for frame in stack.main.frames)
        assert innermost_user_frame(stack.main) == Frame(
            "<module>", str(program.script), program.line(), "with second:  # HERE", True
        )
        assert f"process {program.pid}\n" in text
        assert f"({program.script.name}:{program.line()})" in text


def test_pystack_is_preferred_for_native_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "pystack"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "called with $@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    with hanging(tmp_path, LOCK_ABBA, waits="lock") as program:
        assert native_text([program.pid]) == f"process {program.pid}\ncalled with remote --native {program.pid}"


def test_a_tool_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits until this process has no child more than before: the tool was killed, and somebody has waited for it."""
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\nexec sleep 1000\n")
    tool.chmod(0o755)
    monkeypatch.setattr(stacks, "find_tool", lambda name: str(tool))
    before = own_children()
    with hanging(tmp_path, LOCK_ABBA, waits="lock", inject=False) as program:
        (stack,) = sample_stacks([program.pid], stacks_folder=None, deadline_s=1.0)
    assert (stack.method, stack.problem) == ("proc", "py-spy did not answer in time")
    wait_until(lambda: own_children() <= before, "the tool to be gone")


def own_children() -> set[str]:
    """Ended ones that nobody has waited for are among them."""
    tasks = Path("/proc/self/task").iterdir()
    return {pid for task in tasks for pid in (task / "children").read_text().split()}


def test_what_the_tool_complains_of_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(stacks, "find_tool", lambda name: str(tool))
    with hanging(tmp_path, LOCK_ABBA, waits="lock", inject=False) as program:
        (stack,) = sample_stacks([program.pid], stacks_folder=None)
    assert (stack.method, stack.problem) == ("proc", "py-spy: Permission Denied")


# -- source texts ---------------------------------------------------------------------------------------------------


def test_a_script_given_by_a_relative_path_is_found(tmp_path: Path) -> None:
    needs_ptrace()
    (tmp_path / "inner.py").write_text("import time\ntime.sleep(1000)  # HERE\n")
    with running([sys.executable, "inner.py"], cwd=tmp_path) as process:
        wait_until(lambda: _kind(process.pid) == "sleep", "sleep")
        (stack,) = sample_stacks([process.pid], stacks_folder=None)
    frame = innermost_user_frame(stack.main)
    assert frame is not None
    assert (frame.file, frame.source) == (str(tmp_path / "inner.py"), "time.sleep(1000)  # HERE")


def test_a_script_edited_after_its_start_shows_no_text_rather_than_a_wrong_one(tmp_path: Path) -> None:
    needs_ptrace()
    with hanging(tmp_path, "import time\ntime.sleep(1000)\n", waits="sleep") as program:
        program.script.write_text("import time\nprint('edited')\n")
        later_s = program.script.stat().st_mtime + 60
        os.utime(program.script, (later_s, later_s))
        (stack,) = sample_stacks([program.pid], stacks_folder=None)
        frame = innermost_user_frame(stack.main)
        assert frame is not None
        assert (frame.line, frame.source) == (2, "")


def test_a_named_pipe_in_the_place_of_a_script_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.py")
    thread = ThreadStack(1, "", (Frame("f", str(tmp_path / "x.py"), 1, "", True),))
    assert SourceReader().fill(os.getpid(), [thread], limit_s=20) == (thread,)


def test_a_dead_disk_costs_the_texts_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    is_back = threading.Event()
    asked = []

    def hang(pid: int, threads: object) -> tuple[ThreadStack, ...]:
        asked.append(pid)
        is_back.wait()
        return ()

    monkeypatch.setattr(sources, "_with_sources", hang)
    reader, thread = SourceReader(), ThreadStack(1, "", (Frame("f", "/dead/x.py", 1),))
    assert reader.fill(1, [thread], limit_s=0.05) == (thread,)
    assert reader.fill(2, [thread], limit_s=0.05) == (thread,)
    is_back.set()
    assert asked == [1]


def test_a_line_cannot_write_to_our_screen(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_bytes(b"a = '\x1b[2J\xff'" + b"x" * 1000)
    text = sources.read_line(str(path), 0, 1)
    assert "\x1b" not in text
    assert len(text) == 160
    assert sources.read_line(str(path), 0, 99) == ""


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/me/train.py", True),
        ("<string>", True),
        ("<stdin>", True),
        ("/usr/lib/python3.11/threading.py", False),
        ("/home/me/.venv/lib/python3.12/site-packages/torch/nn/x.py", False),
        ("/usr/lib/python3/dist-packages/numpy/x.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("/tmp/torchinductor_me/ab/cabc.py", False),
        ("", False),
    ],
)
def test_own_code_is_told_by_its_path(file: str, is_own: bool) -> None:
    assert is_own_code(file) is is_own


# -- formats and hashes ---------------------------------------------------------------------------------------------


def test_a_dump_of_python_3_14_with_names_is_read() -> None:
    text = (
        "Thread 0x00007f1 [loader-3] (most recent call first):\n"
        '  File "/a/data.py", line 8 in fetch\n'
        "\n"
        "Current thread 0x00007f2 [MainThread] (most recent call first):\n"
        "  Garbage-collecting\n"
        '  File "/a/train.py", line 3 in <module>\n'
    )
    assert parse_faulthandler(text, 42) == (
        ThreadStack(42, "MainThread", (Frame("<module>", "/a/train.py", 3, "", True),), True),
        ThreadStack(0x7F1, "loader-3", (Frame("fetch", "/a/data.py", 8, "", True),)),
    )


def test_of_two_dumps_the_last_counts() -> None:
    one = 'Current thread 0x1 (most recent call first):\n  File "/a/x.py", line {} in f\n'
    (thread,) = parse_faulthandler(one.format(1) + "\n" + one.format(2), 42)
    assert thread.frames[0].line == 2


def test_a_dump_cut_off_at_a_hundred_threads_has_no_main_thread() -> None:
    text = 'Thread 0x1 (most recent call first):\n  File "/a/x.py", line 1 in f\n...\n'
    assert [thread.is_main for thread in parse_faulthandler(text, 42)] == [False]


def test_only_the_fatal_part_of_a_dump_file_is_a_fault() -> None:
    assert fatal_part('Current thread 0x1 (most recent call first):\n  File "x"\n') == ""
    assert fatal_part("Current ...\nFatal Python error: Aborted\n\nrest") == "Fatal Python error: Aborted\n\nrest"


def test_py_spy_without_thread_ids_is_told_by_name() -> None:
    frames = [{"name": "f", "filename": "/a/x.py", "line": 3, "module": None}]
    entry = {"pid": 9, "thread_id": 77, "thread_name": "MainThread", "os_thread_id": None, "frames": frames}
    (thread,) = parse_py_spy(json.dumps([entry]), 9)
    assert (thread.is_main, thread.thread_id) == (True, 77)


@pytest.mark.parametrize("text", ["", "{}", "Error: x", "null"])
def test_what_is_not_a_list_of_threads_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_py_spy(text, 1)


def test_the_hash_of_all_threads_leaves_housekeeping_out() -> None:
    main = ThreadStack(1, "MainThread", (Frame("f", "/a/x.py", 3),), True)
    monitor = ThreadStack(2, "Thread-1", (Frame("run", "/p/site-packages/tqdm/_monitor.py", 60),))
    moved = ThreadStack(2, "Thread-1", (Frame("run", "/p/site-packages/tqdm/_monitor.py", 65),))
    worker = ThreadStack(3, "Thread-2", (Frame("g", "/a/x.py", 9),))
    base = ProcessStack(1, "", (main, monitor, worker))
    assert others_hash(base) == others_hash(ProcessStack(1, "", (main, moved, worker)))
    assert others_hash(base) != others_hash(ProcessStack(1, "", (main, moved)))
    assert main_hash(base) == main_hash(ProcessStack(1, "", (main,)))


def test_empty_dump_files_of_the_dead_are_forgotten(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    for name, text in ((f"fh.{process.pid}", ""), (f"fh.{os.getpid()}", ""), ("fh.x", ""), ("other", "")):
        (tmp_path / name).write_text(text)
    assert forget_dead(tmp_path) == 1
    (tmp_path / f"fh.{process.pid}").write_text("Fatal Python error: Aborted\n")
    assert forget_dead(tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"fh.{process.pid}", f"fh.{os.getpid()}", "fh.x", "other"]
    )


BUSY_THREADS = """
import threading

def deep(n):
    return deep(n - 1) if n else [object() for _ in range(10)]

def work():
    for number in range(200):
        exec(compile(f"def f(n):\\n  return f(n - 1) if n else 0\\nf(50)", f"<made {number}>", "exec"), {})
        deep(30)

while True:  # HERE
    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_a_busy_program_with_many_threads_survives_being_looked_at(tmp_path: Path, no_py_spy: None) -> None:
    """faulthandler asked for all threads killed this program within five looks; a compile on a GPU died the same."""
    with hanging(tmp_path, BUSY_THREADS) as program:
        wait_until(lambda: catches_signal(program.pid, STACK_SIGNAL), "the handler")
        seen, numbers = 0, itertools.count()

        def look() -> bool:
            nonlocal seen
            # Every fifth look is an incident's, which asks for all threads if nothing moves: here something does.
            is_incident = next(numbers) % 5 == 0
            (stack,) = sample_stacks([program.pid], stacks_folder=program.stacks, native=is_incident)
            seen += stack.method == "faulthandler"
            assert program.process.poll() is None, "it was killed by being looked at"
            return seen >= 25

        wait_until(look, "its answers")


def test_all_threads_of_a_still_process_are_read_at_an_incident(tmp_path: Path, no_py_spy: None) -> None:
    with hanging(tmp_path, LOCK_ABBA) as program:
        stack_at(program, "with second:  # HERE", program.stacks)

        def threads(*, native: bool) -> list[bool]:
            (stack,) = sample_stacks([program.pid], stacks_folder=program.stacks, native=native)
            return [thread.is_main for thread in stack.threads if thread.frames]

        # A process that is late to answer is read from /proc, without frames: look again.
        assert wait_until(lambda: threads(native=True), "an answer") == [True, False]
        assert wait_until(lambda: threads(native=False), "an answer") == [True]


def test_a_py_spy_that_is_merely_late_is_not_replaced_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(stacks, "find_tool", lambda name: str(slow))
    with hanging(tmp_path, SLEEP_LOOP) as program:
        wait_until(lambda: catches_signal(program.pid, STACK_SIGNAL), "the handler")
        (stack,) = sample_stacks([program.pid], stacks_folder=program.stacks, deadline_s=0.3)
        assert (stack.method, stack.problem) == ("proc", "py-spy did not answer in time")
        assert (program.stacks / f"fh.{program.pid}").read_bytes() == b""

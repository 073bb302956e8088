"""Processes and trees of them, real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.machine import proc
from jackline.machine.proc import (
    catches_signal,
    is_python,
    list_threads,
    list_tree,
    open_files,
    read_command,
    read_environ,
    read_process,
    read_tree,
)
from jackline.machine.readings import TreeReading
from jackline.rundir.process_id import read_start_ticks
from tests.machine.conftest import Start, wait_until

SLEEPS = "print('ready'); import time; time.sleep(600)"
GONE = 2**22 - 1  # above every pid_max in use here


def test_a_process_that_is_gone_gives_nothing_and_raises_nothing() -> None:
    assert read_process(GONE) is None
    assert read_tree(GONE).processes == ()
    assert list_tree(GONE) == []
    assert list_threads(GONE) == []
    assert read_command(GONE) == ""
    assert read_environ(GONE) == {}
    assert not is_python(GONE)
    assert not catches_signal(GONE, signal.SIGTERM)
    assert open_files(GONE) == []


def test_one_process_is_read_whole(start: Start) -> None:
    child = start(SLEEPS)
    reading = read_process(child.pid)
    assert reading is not None
    assert reading.pid == child.pid
    assert reading.ppid == os.getpid()
    assert reading.start_ticks == read_start_ticks(child.pid)
    assert reading.comm.startswith("python")
    assert reading.num_threads == 1
    assert reading.rss_bytes > 2**20
    assert reading.is_python


def test_a_command_name_with_brackets_and_spaces_does_not_shift_the_fields(start: Start) -> None:
    child = start("open('/proc/self/comm', 'w').write('a) R (b c)'); " + SLEEPS)
    reading = read_process(child.pid)
    assert reading is not None
    assert (reading.comm, reading.ppid) == ("a) R (b c)", os.getpid())


def test_a_spinner_wants_a_whole_cpu_however_many_others_do(start: Start) -> None:
    child = start("print('ready')\nwhile True: pass")
    begin_s = time.monotonic()  # before the first reading and after the last: a pause between lengthens both sides
    before = read_process(child.pid)
    assert before is not None
    after = wait_until(
        lambda: (r := read_process(child.pid)) and r.wants_cpu_s - before.wants_cpu_s > 0.5 and r,
        "half a second of want",
    )
    passed_s = time.monotonic() - begin_s
    assert after.wants_cpu_s - before.wants_cpu_s <= passed_s + 0.1
    assert after.cpu_s <= after.wants_cpu_s


def test_work_of_threads_that_ended_still_counts(start: Start) -> None:
    code = (
        "import threading, time\n"
        "def work():\n"
        "    end = time.thread_time() + 0.3\n"
        "    while time.thread_time() < end: pass\n"
        "t = threading.Thread(target=work); t.start(); t.join()\n" + SLEEPS
    )
    child = start(code)

    def is_alone() -> bool:  # join() returns a moment before the kernel is done with the thread
        found = read_process(child.pid)
        return found is not None and found.num_threads == 1

    wait_until(is_alone, "the thread to be gone")
    reading = read_process(child.pid)
    assert reading is not None
    assert reading.wants_cpu_s >= 0.28


def test_written_bytes_are_counted(start: Start, tmp_path: Path) -> None:
    code = f"import os; f = os.open({str(tmp_path / 'x')!r}, os.O_CREAT | os.O_WRONLY)\n"
    code += "os.write(f, bytes(10**6)); os.fsync(f)\n"
    child = start(code + SLEEPS)
    reading = read_process(child.pid)
    assert reading is not None
    if reading.write_bytes == 0:
        pytest.skip("the temporary folder is in memory: no bytes reach a device")
    assert reading.write_bytes >= 10**6


def test_a_process_with_many_threads_is_read_by_its_sums(start: Start) -> None:
    code = (
        "import threading, time\n"
        "while time.process_time() < 0.05: pass\n"  # the kernel counts in hundredths of a second
        "for _ in range(100): threading.Thread(target=threading.Event().wait, daemon=True).start()\n" + SLEEPS
    )
    child = start(code)
    reading = read_process(child.pid)
    assert reading is not None
    assert reading.num_threads == 101
    assert reading.wants_cpu_s >= reading.cpu_s > 0


FAMILY = (
    "import subprocess, sys, threading\n"
    'hold = "import sys; sys.stdin.read()"\n'
    "def begin(): return subprocess.Popen([sys.executable, '-SIc', hold], stdin=subprocess.PIPE)\n"
    "first = begin()\n"
    "nested = subprocess.Popen(['sh', '-c', 'sleep 600; true'])\n"
    "done = threading.Event(); made = threading.Event()\n"
    "def from_thread():\n"
    "    global late; late = begin(); made.set(); done.wait()\n"
    "threading.Thread(target=from_thread, daemon=True).start(); made.wait()\n"
    "print('ready'); done.wait()"
)


def end_tree(pid: int) -> None:
    for member in reversed(list_tree(pid)):
        os.kill(member, signal.SIGKILL)


def test_a_tree_has_its_root_first_and_every_descendant_also_of_other_threads(start: Start) -> None:
    root = start(FAMILY)
    try:

        def family() -> TreeReading | None:
            tree = read_tree(root.pid)
            return tree if sorted(p.comm for p in tree.processes)[-2:] == ["sh", "sleep"] else None

        tree = wait_until(family, "the shell and its sleep")
        assert len(tree.processes) == 5
        pids = [process.pid for process in tree.processes]
        assert pids[0] == root.pid
        for process in tree.processes[1:]:
            assert pids.index(process.ppid) < pids.index(process.pid)
        assert sum(process.is_python for process in tree.processes) == 3
        assert tree.sockets is None
        assert read_tree(root.pid, with_network=True).sockets == {}
    finally:
        end_tree(root.pid)


def test_without_the_kernels_list_of_children_a_scan_finds_the_same_tree(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = start(FAMILY)
    try:
        wanted = wait_until(lambda: len(t := list_tree(root.pid)) == 5 and t, "five processes")
        monkeypatch.setattr(proc, "_children_by_kernel", lambda pid: None)
        assert sorted(list_tree(root.pid)) == sorted(wanted)
        assert list_tree(root.pid)[0] == root.pid
    finally:
        end_tree(root.pid)


def test_a_parent_with_more_threads_than_we_ask_one_by_one_still_shows_its_children(start: Start) -> None:
    code = (
        "import subprocess, threading\n"
        "for _ in range(100): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "child = subprocess.Popen(['sleep', '600'])\n" + SLEEPS
    )
    root = start(code)
    try:
        assert [process.comm for process in wait_until(lambda: read_tree(root.pid).processes, "a tree")][1:] == [
            "sleep"
        ]
    finally:
        end_tree(root.pid)


def test_two_hundred_children_are_all_seen(start: Start) -> None:
    code = (
        "import os, signal, time\n"
        "for _ in range(200):\n"
        "    if os.fork() == 0:\n"
        "        signal.pause(); os._exit(0)\n" + SLEEPS
    )
    root = start(code)
    try:
        tree = read_tree(root.pid, with_network=True)
        assert len(tree.processes) == 201
        kinds = [process.wait.kind for process in tree.processes[1:]]
        # Those at the end of a large tree are read with less, but a plain sleep is still told.
        assert kinds == ["sleep"] * 200
    finally:
        end_tree(root.pid)


def test_a_command_line_cannot_write_to_our_screen(start: Start) -> None:
    child = start(SLEEPS, "\x1b[2Jboo\nnext", "b c")
    command = read_command(child.pid)
    assert command.endswith(" [2Jboo next b c")
    assert not any(ord(letter) < 32 for letter in command)


def test_a_zombie_has_its_name_in_brackets() -> None:
    child = subprocess.Popen(["true"])
    assert wait_until(lambda: read_command(child.pid) == "[true]", "a zombie named [true]")
    child.wait()


def test_the_environment_is_the_one_it_was_started_with(start: Start) -> None:
    child = start(SLEEPS, env={**os.environ, "RANK": "3", "EMPTY": "", "WITH_EQUALS": "a=b"})
    found = read_environ(child.pid)
    assert (found["RANK"], found["EMPTY"], found["WITH_EQUALS"]) == ("3", "", "a=b")


def test_python_is_known_by_its_program_and_a_shell_is_not_python(start: Start) -> None:
    child = start(SLEEPS)
    assert is_python(child.pid)
    shell = subprocess.Popen(["sleep", "600"])
    try:
        assert not is_python(shell.pid)
    finally:
        shell.kill()
        shell.wait()


def test_a_shell_that_becomes_python_is_python(start: Start, tmp_path: Path) -> None:
    # Same pid, same start time, another program.
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    shell = subprocess.Popen(
        ["sh", "-c", f"read x < {gate}; exec {sys.executable} -Sc 'import time; time.sleep(600)'"]
    )
    try:
        assert not is_python(shell.pid)
        gate.write_text("go\n")
        assert wait_until(lambda: is_python(shell.pid), "the shell to be Python")
    finally:
        shell.kill()
        shell.wait()


def test_a_handler_is_seen_before_a_signal_is_sent(start: Start) -> None:
    number = signal.SIGRTMIN + 7
    plain = start(SLEEPS)
    armed = start(f"import signal; signal.signal({number}, lambda *a: None); " + SLEEPS)
    assert not catches_signal(plain.pid, number)
    assert catches_signal(armed.pid, number)


def test_open_files_tell_what_is_written_and_when(start: Start, tmp_path: Path) -> None:
    log, data = tmp_path / "train.log", tmp_path / "data.bin"
    data.write_bytes(bytes(10))
    os.utime(data, (1000, 1000))
    code = f"f = open({str(log)!r}, 'w'); f.write('x' * 77); f.flush(); d = open({str(data)!r}, 'rb')\n"
    child = start(code + SLEEPS, stderr=subprocess.DEVNULL)
    found = {Path(file.path).name: file for file in open_files(child.pid)}
    assert list(found) == ["train.log", "data.bin"]
    assert (found["train.log"].size_bytes, found["train.log"].is_writing) == (77, True)
    assert (found["data.bin"].size_bytes, found["data.bin"].is_writing) == (10, False)
    assert found["data.bin"].modified_s == 1000
    assert found["train.log"].modified_s > 1000

"""What a thread waits on, seen on real threads that wait on real things."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.machine import waits as syscalls
from jackline.machine.proc import list_threads, read_wait
from jackline.machine.procfs import read_text
from jackline.machine.readings import Wait
from jackline.machine.waits import classify_wchan
from tests.deadline import HANGS_S
from tests.machine.conftest import Start, wait_until

READY = "print('ready')\n"
SLEEPS = READY + "import time; time.sleep(600)"
LOCKED = "import threading; lock = threading.Lock(); lock.acquire()\n" + READY + "lock.acquire()"
PIPE = "import os; r, w = os.pipe()\n" + READY + "os.read(r, 1)"
LOCAL = "import socket; a, b = socket.socketpair()\n" + READY + "a.recv(1)"
CHILD = "import subprocess; child = subprocess.Popen(['sleep', '600'])\n" + READY + "child.wait()"
TWO_PIPES = "import os, select; r, w = os.pipe(); s, x = os.pipe(); p = select.poll()\n" + (
    "p.register(r, select.POLLIN); p.register(s, select.POLLIN)\n" + READY + "p.poll()"
)
SELECT = "import os, select; r, w = os.pipe()\n" + READY + "select.select([r], [], [])"
SELECT_NOTHING = "import select\n" + READY + "select.select([], [], [], 600)"
PAUSE = "import signal\n" + READY + "signal.pause()"
EVENT_LOOP = (
    "import asyncio\nasync def main():\n    print('ready')\n    await asyncio.sleep(600)\nasyncio.run(main())"
)
SPIN = READY + "while True: pass"


def wait_of(pid: int, kind: str, tid: int | None = None) -> Wait:
    """The wait, once the process is in the call it announced: it prints 'ready' just before."""
    last = Wait("unknown")

    def is_there() -> Wait | None:
        nonlocal last
        last = read_wait(pid, tid)
        return last if last.kind == kind else None

    try:
        found: Wait = wait_until(is_there, kind)
    except AssertionError:
        raise AssertionError(f"expected {kind}, it is {last}") from None
    return found


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (SPIN, "running"),
        (SLEEPS, "sleep"),
        (PAUSE, "sleep"),
        (SELECT_NOTHING, "sleep"),
        (LOCKED, "lock"),
        (PIPE, "pipe"),
        (TWO_PIPES, "pipe"),
        (SELECT, "pipe"),
        (LOCAL, "local_socket"),
        (EVENT_LOOP, "local_socket"),
    ],
)
def test_a_wait_is_named_by_what_is_waited_on(start: Start, code: str, kind: str) -> None:
    child = start(code)
    assert wait_of(child.pid, kind).kind == kind


@pytest.mark.parametrize(
    ("code", "kind", "is_endless"),
    [
        (LOCKED, "lock", True),
        (READY + "import threading; l = threading.Lock(); l.acquire(); l.acquire(timeout=600)", "lock", False),
        (PIPE, "pipe", True),
        (SELECT, "pipe", True),
        (TWO_PIPES, "pipe", True),
        (TWO_PIPES.replace("p.poll()", "p.poll(600_000)"), "pipe", False),
        (LOCAL, "local_socket", True),
        (EVENT_LOOP, "local_socket", False),
        (EVENT_LOOP.replace("asyncio.sleep(600)", "asyncio.Event().wait()"), "local_socket", True),
    ],
)  # fmt: skip
def test_a_call_without_a_time_limit_is_known(start: Start, code: str, kind: str, is_endless: bool) -> None:
    assert wait_of(start(code).pid, kind).is_endless == is_endless


def test_a_wait_for_a_child_is_named(start: Start) -> None:
    child = start(CHILD)
    found = wait_of(child.pid, "child")
    grandchild = int((read_text(f"/proc/{child.pid}/task/{child.pid}/children") or "0").split()[0])
    assert (found.target in ("", f"process {grandchild}"), found.is_endless) == (True, True)
    os.kill(grandchild, signal.SIGKILL)


def test_a_silent_far_end_is_named_with_its_address(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; s = socket.create_connection(('127.0.0.1', {port}))\n" + READY + "s.recv(1)"
        child = start(code)
        found = wait_of(child.pid, "network")
    assert found.target == f"127.0.0.1:{port}"
    assert found.fd is not None


def test_an_ipv6_address_is_readable(start: Start) -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as problem:
        pytest.skip(f"no IPv6 loopback here: {problem}")
    with server:
        port = server.getsockname()[1]
        code = f"import socket; s = socket.create_connection(('::1', {port}))\n" + READY + "s.recv(1)"
        child = start(code)
        assert wait_of(child.pid, "network").target == f"[::1]:{port}"


def test_the_network_names_a_poll_that_also_watches_a_wake_up_pipe(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            "import os, select, socket\n"
            f"s = socket.create_connection(('127.0.0.1', {port})); r, w = os.pipe()\n"
            "e = select.epoll(); e.register(r, 1); e.register(s, 1)\n" + READY + "e.poll()"
        )
        child = start(code)
        assert wait_of(child.pid, "network").target == f"127.0.0.1:{port}"


def test_a_server_that_accepts_nobody_is_listening(start: Start) -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0))\n" + READY + "s.accept()"
    child = start(code)
    assert wait_of(child.pid, "network").target.startswith("listening on 127.0.0.1:")


@pytest.mark.parametrize(
    "lock", ["fcntl.flock(f, fcntl.LOCK_EX)", "fcntl.lockf(f, fcntl.LOCK_EX)"], ids=["flock", "fcntl"]
)
def test_a_lock_on_a_file_is_named_with_the_file(start: Start, tmp_path: Path, lock: str) -> None:
    path = tmp_path / "data.lock"
    with open(path, "w") as held:
        (fcntl.flock if "flock(" in lock else fcntl.lockf)(held, fcntl.LOCK_EX)
        child = start(f"import fcntl; f = open({str(path)!r}, 'w')\n" + READY + lock)
        assert wait_of(child.pid, "file_lock").target == str(path)


def test_a_terminal_is_a_keyboard(start: Start) -> None:
    leader, follower = pty.openpty()
    try:
        child = start(READY + "input()", stdin=follower)
        found = wait_of(child.pid, "keyboard")
        assert found == Wait("keyboard", os.ttyname(follower), 0, is_endless=True)
    finally:
        os.close(leader)
        os.close(follower)


def test_whoever_has_made_a_terminal_waits_for_the_program_in_it(start: Start) -> None:
    made = "import os, pty, select\nmine, theirs = pty.openpty(); os.dup2(theirs, 9)\n" + READY
    for call in ("os.read(mine, 100)", "select.select([mine], [], [])"):
        child = start(made + call)
        found = wait_of(child.pid, "pipe")
        assert found.target == f"the program in {Path(f'/proc/{child.pid}/fd/9').readlink()}"
        assert found.is_endless


def test_standard_input_that_no_relative_feeds_is_a_keyboard(start: Start) -> None:
    # The shell between us holds only the reading end, as every ancestor does when a person's pipe passes through.
    reading, writing = os.pipe()
    try:
        code = (
            "import os, subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-uSc', 'input()'])\n"
            "print('ready', flush=True)\n"
            "child.wait()"
        )
        parent = start(code, stdin=reading)
        child = int((read_text(f"/proc/{parent.pid}/task/{parent.pid}/children") or "0").split()[0])
        assert wait_of(child, "keyboard") == Wait("keyboard", "standard input (a pipe)", 0, is_endless=True)
    finally:
        os.close(reading)
        os.close(writing)


def test_standard_input_that_is_a_local_socket_is_a_keyboard(start: Start) -> None:
    near, far = socket.socketpair()
    with near, far:
        child = start(READY + "input()", stdin=near.fileno())
        assert wait_of(child.pid, "keyboard") == Wait(
            "keyboard", "standard input (a local socket)", 0, is_endless=True
        )


def test_standard_input_fed_by_the_parent_is_a_pipe(start: Start) -> None:
    child = start(READY + "input()", stdin=subprocess.PIPE)
    found = wait_of(child.pid, "pipe")
    assert found.fd == 0
    assert found.target.endswith(f"(pid {os.getpid()})")


def test_a_named_pipe_is_a_pipe_when_opened_and_when_read(start: Start, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    opening = start(READY + f"open({str(fifo)!r})")
    assert wait_of(opening.pid, "pipe").target == f"opening {fifo}, a named pipe"
    opening.kill()
    opening.wait()
    reading = start(f"f = open({str(fifo)!r}, 'r+b', buffering=0)\n" + READY + "f.read(1)")
    assert wait_of(reading.pid, "pipe").target == str(fifo)


def test_a_stopped_process_is_stopped(start: Start) -> None:
    child = start(SLEEPS)
    os.kill(child.pid, signal.SIGSTOP)
    assert wait_of(child.pid, "stopped") == Wait("stopped")


def test_a_sleep_interrupted_by_stop_and_continue_is_still_a_sleep(start: Start) -> None:
    # The kernel then shows restart_syscall, which says nothing: the function slept in does.
    child = start(SLEEPS)
    wait_of(child.pid, "sleep")
    os.kill(child.pid, signal.SIGSTOP)
    wait_of(child.pid, "stopped")
    os.kill(child.pid, signal.SIGCONT)
    assert wait_of(child.pid, "sleep") == Wait("sleep")


def test_a_zombie_and_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    assert wait_of(child.pid, "zombie") == Wait("zombie")
    child.wait()
    assert read_wait(child.pid) == Wait("zombie", "gone")


def test_every_thread_has_its_own_wait(start: Start) -> None:
    code = (
        "import threading, time\n"
        "lock = threading.Lock(); lock.acquire()\n"
        "threading.Thread(target=lock.acquire, daemon=True).start()\n" + READY + "time.sleep(600)"
    )
    child = start(code)
    main, other = wait_until(lambda: (t := list_threads(child.pid)) and len(t) == 2 and t, "two threads")
    assert main == child.pid
    assert wait_of(child.pid, "sleep", main) == Wait("sleep")
    found = wait_of(child.pid, "lock", other)
    assert (found.is_endless, found.address is not None) == (True, True)


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler: Python cannot stay between vfork and exec")
def test_a_parent_that_lent_its_memory_waits_for_its_child_and_not_for_the_disk(tmp_path: Path) -> None:
    source = tmp_path / "lend.c"
    source.write_text("#include <unistd.h>\nint main(void) { if (vfork() == 0) { pause(); _exit(0); } return 0; }\n")
    subprocess.run(["gcc", "-w", "-o", str(tmp_path / "lend"), str(source)], check=True)
    parent = subprocess.Popen([str(tmp_path / "lend")])
    try:
        assert wait_of(parent.pid, "child") == Wait("child", is_endless=True)
        children = read_text(f"/proc/{parent.pid}/task/{parent.pid}/children") or ""
    finally:
        parent.kill()
    for word in children.split():
        os.kill(int(word), signal.SIGKILL)
    parent.wait()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (SLEEPS, "sleep"),
        (LOCKED, "lock"),
        (PIPE, "pipe"),
        (LOCAL, "local_socket"),
        (SELECT, "poll"),
        (CHILD, "child"),
    ],
)
def test_the_kernel_function_alone_gives_the_same_kind(start: Start, code: str, kind: str) -> None:
    child = start(code)
    wait_of(child.pid, "pipe" if code is SELECT else kind)
    name = read_text(f"/proc/{child.pid}/wchan") or "0"
    for word in (read_text(f"/proc/{child.pid}/task/{child.pid}/children") or "").split():
        os.kill(int(word), signal.SIGKILL)
    if name == "0":
        pytest.skip("this kernel does not show where a process sleeps")
    assert classify_wchan(name) == kind, name


def test_without_the_right_to_look_the_answer_is_unknown_and_not_an_error(start: Start) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    child = start(SLEEPS)
    wait_of(child.pid, "sleep")
    code = (
        "import os, sys\nfrom jackline.machine.proc import read_wait, read_process, open_files, read_environ\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "pid = int(sys.argv[1])\n"
        "print(read_wait(pid)); r = read_process(pid); print(r.wait, r.read_bytes, r.state)\n"
        "print(open_files(pid), read_environ(pid))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(child.pid)], capture_output=True, text=True, timeout=HANGS_S
    )
    unknown = str(Wait("unknown"))
    assert done.stdout.splitlines() == [unknown, f"{unknown} 0 S", "[] {}"], done.stderr


def test_both_processors_have_a_number_for_every_group() -> None:
    groups = {frozenset(syscalls.table_for(machine).values()) for machine in ("x86_64", "aarch64")}
    assert len(groups) == 1
    assert syscalls.table_for("riscv64") == {}
    aarch64 = syscalls.table_for("aarch64")
    assert (aarch64[98], aarch64[63], aarch64[115], aarch64[260], aarch64[82]) == (
        "lock",
        "read",
        "sleep",
        "child",
        "sync",
    )


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("time.sleep(600)", "sleep"),
        ("threading.Event().wait(600)", "lock"),
        ("threading.Timer(600, print).run()", "lock"),
    ],
)
def test_the_end_of_a_sleep_and_of_a_timed_wait_is_read(start: Start, call: str, kind: str) -> None:
    before_s = time.monotonic()
    child = start("import threading, time\n" + READY + call)
    found = wait_of(child.pid, kind)
    assert found.until_s is not None
    assert before_s + 600 <= found.until_s <= time.monotonic() + 600


@pytest.mark.parametrize(
    "call", ["select.select([r], [], [], 600)", "p = select.poll(); p.register(r); p.poll(600_000)"]
)
def test_of_a_poll_with_a_limit_the_duration_is_read(start: Start, call: str) -> None:
    child = start("import os, select; r, w = os.pipe()\n" + READY + call)
    assert wait_of(child.pid, "pipe").lasts_s == 600


def test_of_a_sleep_in_a_command_the_duration_is_read() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        assert wait_of(child.pid, "sleep").lasts_s == 600
        child.kill()


def test_a_wait_without_a_limit_has_no_end(start: Start) -> None:
    assert wait_of(start(LOCKED).pid, "lock").until_s is None


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup of version 1 whose processes can be frozen."""
    folder = Path("/sys/fs/cgroup/freezer") / f"jackline-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer of cgroups version 1 that this user may use: {error}")
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    for pid in (folder / "cgroup.procs").read_text().split():
        (folder.parent / "cgroup.procs").write_text(pid)
    folder.rmdir()


@pytest.mark.parametrize(("code", "kind"), [(SLEEPS, "sleep"), (LOCKED, "lock"), (PIPE, "pipe"), (SPIN, "running")])
def test_a_process_frozen_by_its_cgroup_is_paused_and_does_not_wait_for_the_disk(
    start: Start, freezer: Path, code: str, kind: str
) -> None:
    child = start(code)
    wait_of(child.pid, kind)
    (freezer / "cgroup.procs").write_text(str(child.pid))
    (freezer / "freezer.state").write_text("FROZEN")
    wait_until(lambda: (freezer / "freezer.state").read_text() == "FROZEN\n", "the kernel to freeze it")
    assert read_wait(child.pid) == syscalls.FROZEN
    assert syscalls.wait_in_state(child.pid, child.pid, "D", is_cheap=True) == syscalls.FROZEN

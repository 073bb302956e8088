"""Tiny real programs that stand still at a known line, for the tests of stacks, verdicts, incidents and `why`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jackline.machine.proc import read_environ, read_tree, read_wait
from jackline.supervisor.child.environment import child_environment
from tests.deadline import HANGS_S

PATIENCE_S = HANGS_S
T = TypeVar("T")

LOCK_ABBA = """
import threading

first, second = threading.Lock(), threading.Lock()
both = threading.Barrier(2)


def other():
    with second:
        both.wait()
        with first:  # THERE
            pass


threading.Thread(target=other, name="other").start()
with first:
    both.wait()
    with second:  # HERE
        pass
"""
SOCKET_RECV = """
import socket

server = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(server.getsockname())
connection.recv(10)  # HERE
"""
GIL_IN_C = """
import ctypes

ctypes.PyDLL(None).sleep(10_000)  # HERE
"""
REGEX = """
import re

re.match(r"(a+)+$", "a" * 60 + "b")  # HERE
"""
SLEEP_LOOP = """
import os, time

while not os.path.exists("never"):
    time.sleep(0.05)  # HERE
"""
STOPPED_WORKER = """
import multiprocessing, os, signal


def prepare(connection):
    os.kill(os.getpid(), signal.SIGSTOP)  # THERE


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=prepare, args=(theirs,), daemon=True).start()
    ours.recv()  # HERE
"""
FORK_DEADLOCK = """
import os, threading

lock = threading.Lock()
held = threading.Event()


def hold():
    with lock:
        held.set()
        threading.Event().wait()


threading.Thread(target=hold, daemon=True).start()
held.wait()
if os.fork() == 0:
    with lock:  # THERE
        os._exit(0)
os.wait()  # HERE
"""
NOISY_LOGGER = """
import socket, threading, time

server = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(server.getsockname())
accepted, _ = server.accept()


def drain():
    while accepted.recv(65536):
        pass


def send():
    while True:
        connection.sendall(b"x" * 100)
        time.sleep(0.2)


threading.Thread(target=drain, daemon=True).start()
threading.Thread(target=send, daemon=True).start()
lock = threading.Lock()
lock.acquire()
lock.acquire()  # HERE
"""


@dataclass(frozen=True)
class Hanging:
    """A started program and where its marked lines are."""

    process: subprocess.Popen[bytes]
    script: Path
    stacks: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, marker: str = "HERE") -> int:
        lines = self.script.read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))

    def pids(self) -> list[int]:
        return [process.pid for process in read_tree(self.pid).processes]

    def wait_kind(self) -> str:
        return read_wait(self.pid).kind


def wait_until(is_so: Callable[[], T], what: str) -> T:
    """The first true value, polled with a deadline that only a broken program meets."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:.0f} s in vain for {what}"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Any program, killed when the block ends. It begins once the program has its own command line and environment:
    Popen comes back a moment before."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
    try:
        wait_until(lambda: read_environ(process.pid), f"the start of {command}")
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@contextlib.contextmanager
def hanging(
    folder: Path, text: str, *, waits: str = "", inject: bool = True, python: str = sys.executable
) -> Iterator[Hanging]:
    """Run `text` as a script until the block ends; `waits` is what its main thread must wait on before it begins."""
    folder.mkdir(parents=True, exist_ok=True)
    script, stacks = folder / "program.py", folder / "stacks"
    script.write_text(text)
    stacks.mkdir(exist_ok=True)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JACKLINE"))}
    environ = child_environment(
        plain, stacks=stacks, inject=inject, stdbuf=None, surface_is_terminal=False, columns=80
    )
    with open(folder / "out", "wb") as out:
        process = subprocess.Popen(
            [python, str(script)],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    program = Hanging(process, script, stacks)
    try:
        if waits:
            wait_until(lambda: _is_there(program, waits), f"{waits} in {script}")
        yield program
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)


def _is_there(program: Hanging, waits: str) -> bool:
    assert program.process.poll() is None, (program.script.parent / "out").read_text()
    return program.wait_kind() == waits

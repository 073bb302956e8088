"""Runs the zoo's programs beside the tests: a process of its own, which no test's environment or signals reach.

    python -m tests.stories.keeper FOLDER AT_ONCE      (paths of the programs as one line of JSON on stdin)

Each program is waited for and needs little CPU, so they pass while other tests compute; the tests that
ask for the outcomes come last. Ends when every program has run, or as soon as its stdin is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.zoo import Program, Zoo, read_program

ROOT = Path(__file__).parents[2]
LOCK = "keeper.lock"


class Keeper:
    """The process, seen from the test worker that started it."""

    def __init__(self, programs: Sequence[Program], folder: Path, at_once: int) -> None:
        # The lock is the process's life: taken here and inherited, it is free again when that process has ended.
        with open(folder / LOCK, "wb") as lock, open(folder / "keeper.txt", "wb") as said:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.stories.keeper", str(folder), str(at_once)],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True,
                pass_fds=[lock.fileno()],
            )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(program.path) for program in programs]).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Lets the programs under way end; no further one is started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def is_alive(folder: Path) -> bool:
    with open(folder / LOCK, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def leave_the_meter() -> None:
    """Out of the cgroup in which tests.cpu_seconds counts the worker that happened to start this process: whatever
    test was under way there would be blamed for the CPU time of all programs."""
    if "/jackline-tests-" in Path("/proc/self/cgroup").read_text():
        with contextlib.suppress(OSError):
            Path("/sys/fs/cgroup/cpuacct/cgroup.procs").write_text(str(os.getpid()))


def keep(folder: Path, at_once: int) -> None:
    leave_the_meter()
    paths = [Path(path) for path in json.loads(sys.stdin.readline())]
    zoo = Zoo([read_program(path) for path in paths], folder, at_once=at_once)

    def give_up_when_alone() -> None:
        os.read(sys.stdin.fileno(), 1)
        zoo.close()

    threading.Thread(target=give_up_when_alone, daemon=True).start()
    zoo.wait()


if __name__ == "__main__":
    keep(Path(sys.argv[1]), int(sys.argv[2]))

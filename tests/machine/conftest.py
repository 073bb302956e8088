"""Real processes to look at: started, waited for, ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.deadline import HANGS_S

DEADLINE_S = HANGS_S
Start = Callable[..., "subprocess.Popen[str]"]


def wait_until(is_so: Callable[[], Any], what: str) -> Any:
    """Poll a state, with a deadline; returns what was true."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if found := is_so():
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited {DEADLINE_S:.0f} s for: {what}")


@pytest.fixture
def start() -> Iterator[Start]:
    """start('code', ...) runs Python code that prints 'ready' when it is where it should be."""
    children: list[subprocess.Popen[str]] = []

    def begin(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        options = {"stdin": subprocess.DEVNULL, **options}
        child = subprocess.Popen(
            [sys.executable, "-uSc", code, *arguments], stdout=subprocess.PIPE, text=True, **options
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield begin
    for child in children:
        child.kill()
        child.wait(DEADLINE_S)
        if child.stdout:
            child.stdout.close()
        if child.stdin:
            child.stdin.close()


@dataclass(frozen=True)
class TestCgroup:
    """A memory cgroup made for one test."""

    __test__ = False
    path: Path
    version: int

    def set_limit(self, count: int) -> None:
        (self.path / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")).write_text(str(count))
        swap = self.path / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")

    def join_code(self) -> str:
        """Python code by which a process moves itself in."""
        return f"open({str(self.path / 'cgroup.procs')!r}, 'w').write('0')\n"


def _memory_hierarchy() -> tuple[Path, int] | None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point, filesystem = Path(left.split()[4]), right.split()[0]
        if filesystem == "cgroup" and "memory" in right.split()[2].split(","):
            return point, 1
        if filesystem == "cgroup2" and "memory" in _words(point / "cgroup.subtree_control"):
            return point, 2
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


@pytest.fixture
def cgroup(request: pytest.FixtureRequest) -> Iterator[TestCgroup]:
    """A new memory cgroup below the top of the hierarchy; removed afterwards."""
    found = _memory_hierarchy()
    if found is None:
        pytest.skip("no memory cgroup hierarchy is mounted here")
    path = found[0] / f"jackline-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as problem:
        pytest.skip(f"memory cgroups cannot be made here: {problem}")
    try:
        yield TestCgroup(path, found[1])
    finally:
        for pid in (path / "cgroup.procs").read_text().split():
            os.kill(int(pid), 9)
        wait_until(lambda: not (path / "cgroup.procs").read_text(), "the cgroup to be empty")
        path.rmdir()

"""Deadlocks of real programs are proved and told as a cycle; what is alive is never called dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jackline.supervisor.child.environment import INJECT_FOLDER
from jackline.supervisor.hang.deadlock import Deadlock, Waiter, find_dead, find_deadlock
from jackline.supervisor.stacks.inside import parse_report
from jackline.supervisor.stacks.standing import read_standing
from tests.deadline import HANGS_S
from tests.supervisor.deadlocks import ALIVE, CASES, Case
from tests.supervisor.hanging import Hanging, hanging, wait_until


def prove(program: Hanging) -> Deadlock | None:
    """The same proof twice: a program that is still starting may wait for a moment."""
    found = [find_deadlock(read_standing(program.pids(), program.stacks), program.pid) for _ in range(2)]
    return found[0] if found[0] == found[1] else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_real_deadlock_is_proved_and_told(case: Case, tmp_path: Path) -> None:
    with hanging(tmp_path, case.text, waits=case.waits) as program:
        found = wait_until(lambda: prove(program), "a proof")
        assert found.has_main == case.has_main
        markers = {name: program.line(name) for name in ("HERE", "THERE") if f"# {name}" in case.text}
        at = 0
        for part in case.says:
            at = found.text.find(part.format(**markers), at)
            assert at >= 0, (part.format(**markers), found.text)


@pytest.mark.parametrize(("name", "waits", "text"), ALIVE, ids=[name for name, _, _ in ALIVE])
def test_what_can_still_continue_is_not_called_a_deadlock(name: str, waits: str, text: str, tmp_path: Path) -> None:
    with hanging(tmp_path, text, waits=waits) as program:
        settled = wait_until(lambda: _settled(program, waits), "a standstill")
        for _ in range(3):
            found = find_deadlock(read_standing(program.pids(), program.stacks), program.pid)
            assert found is None, (name, found, settled)
            wait_until(lambda: program.wait_kind() == waits, waits)


def _settled(program: Hanging, waits: str) -> bool:
    """Whether every thread of it sleeps in the kernel."""
    standing = read_standing(program.pids(), program.stacks)
    is_still = all(thread.wait.kind not in ("running", "disk") for thread in standing.threads)
    return is_still and program.wait_kind() == waits and len(standing.reports) >= 1


@pytest.mark.parametrize("version", ["3.12", "3.13"])
@pytest.mark.parametrize("name", ["abba_on_one_line", "abba_by_acquire", "ring_of_three_in_a_class"])
def test_other_versions_of_python_are_read_too(version: str, name: str, tmp_path: Path) -> None:
    pythons = sorted((Path.home() / ".pyenv/versions").glob(f"{version}*/bin/python"))
    if not pythons:
        pytest.skip(f"Python {version} is not installed here")
    case = next(case for case in CASES if case.name == name)
    with hanging(tmp_path, case.text, waits=case.waits, python=str(pythons[0])) as program:
        found = wait_until(lambda: prove(program), "a proof")
        assert found.is_cycle
        assert found.text.endswith("they wait for each other")


def test_asking_changes_nothing_in_the_program(tmp_path: Path) -> None:
    """Local variables seen through `locals()`, and objects that only a frame holds, stay as they are."""
    text = """
import os, sys, threading, time
class Big: pass
def release_later():
    while not os.path.exists("go"): time.sleep(0.02)
    lock.release()
def work(lock):
    config = locals()
    big = Big()
    before = sys.getrefcount(big)
    lock.acquire()
    lock.acquire(timeout=1000)  # HERE
    print("same" if sorted(config) == ["lock"] and sys.getrefcount(big) == before else "changed", flush=True)
lock = threading.Lock()
threading.Thread(target=release_later, daemon=True).start()
work(lock)
"""
    with hanging(tmp_path, text, waits="lock") as program:
        for _ in range(3):
            wait_until(lambda: read_standing([program.pid], program.stacks).reports, "an answer")
        (tmp_path / "go").touch()
        wait_until(lambda: (tmp_path / "out").read_text(), "its words")
    assert (tmp_path / "out").read_text() == "same\n"


def _waiter(node: int, providers: tuple[int, ...] | None, *, needs_all: bool = False) -> Waiter:
    nodes = None if providers is None else frozenset((1, tid) for tid in providers)
    return Waiter((1, node), "", "", "", nodes, needs_all)


def test_whoever_could_be_woken_by_somebody_alive_is_alive() -> None:
    nodes = {(1, tid) for tid in range(1, 6)}

    def dead(*waiters: Waiter) -> set[int]:
        return {tid for _, tid in find_dead({waiter.node: waiter for waiter in waiters}, nodes)}

    assert dead(_waiter(1, (2,)), _waiter(2, (1,))) == {1, 2}
    assert dead(_waiter(1, (2,)), _waiter(2, (3,))) == set()
    assert dead(_waiter(1, (2, 3)), _waiter(2, (1,))) == set()
    assert dead(_waiter(1, (2, 3), needs_all=True), _waiter(2, (2,))) == {1, 2}
    assert dead(_waiter(1, None), _waiter(2, (1,))) == set()
    assert dead(_waiter(1, ())) == {1}
    assert dead(*[_waiter(tid, (tid % 5 + 1,)) for tid in range(1, 6)]) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"threads": 3}', b'{"threads": [{"ident": "x"}]}'])
def test_a_damaged_answer_proves_nothing(data: bytes) -> None:
    report = parse_report(data, 7)
    assert report is None or report.threads == ()


RUNNING = """
import os, queue, sys, threading, types
sys.setswitchinterval(1e-5)
package = types.ModuleType("_jackline_inside")
package.__path__ = [sys.argv[1]]
sys.modules["_jackline_inside"] = package
from _jackline_inside import awaited

class Guard:
    def __init__(self): self.lock = threading.Lock()
    def __enter__(self): self.lock.acquire(); return self
    def __exit__(self, *error): self.lock.release()

def work():
    lock, again, items = threading.Lock(), threading.RLock(), queue.Queue()
    while True:
        with lock, again:
            with Guard(): rows = [object() for _ in range(3)]
        with Guard(): items.put(object()); items.get()
        with open(os.devnull) as file: file.read()

for _ in range(4): threading.Thread(target=work, daemon=True).start()
held = 0
for _ in range(1500):
    stacks = {ident: awaited.list_frames(frame) for ident, frame in awaited.thread_frames().items()}
    held += sum(len(thread["holds"]) for thread in awaited.list_threads(stacks))
print("held", held, flush=True)
os._exit(0)
"""


def test_threads_that_run_while_they_are_looked_at_do_not_crash_the_process() -> None:
    """What they keep in their frames is gone in the next instant; objects are made of what still stands there."""
    command = [sys.executable, "-c", RUNNING, str(Path(INJECT_FOLDER).parent / "inside")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0 and done.stdout.startswith("held "), (done.returncode, done.stderr)

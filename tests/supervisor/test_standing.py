"""What only a process itself knows: tasks of event loops, roles of workers; and when it is asked."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jackline.diagnosis.doing import waiting_words
from jackline.diagnosis.frames import Frame, ProcessStack, ThreadStack, innermost_user_frame
from jackline.diagnosis.waiting import effective_wait
from jackline.machine.readings import Wait
from jackline.machine.ties import FileLock, read_file_locks
from jackline.supervisor.attempt.hang_watch import AskedBefore
from jackline.supervisor.stacks.dumps import without_inherited
from jackline.supervisor.stacks.standing import Standing, printed_endings, read_standing
from jackline.supervisor.stacks.take import sample_stacks, with_reports
from tests.deadline import HANGS_S
from tests.supervisor.hanging import Hanging, hanging, wait_until

ASYNCIO = """
import asyncio
async def fetch(batches):
    async with asyncio.timeout(1000):
        await batches.get()  # HERE
async def main():
    batches = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        for number in range(2): group.create_task(fetch(batches), name=f"fetch-{number}")
asyncio.run(main())
"""
IN_A_THREAD = """
import asyncio, threading
class Client:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
    async def get(self):
        await asyncio.Event().wait()  # HERE
client = Client()
asyncio.run_coroutine_threadsafe(client.get(), client.loop).result()
"""
POOL = """
import multiprocessing, time
def work(number): time.sleep(1000)  # HERE
if __name__ == "__main__":
    multiprocessing.get_context("fork").Pool(2).map(work, [1])
"""


def answered(program: Hanging, num_reports: int = 1) -> Standing:
    def ask() -> Standing | None:
        standing = read_standing(program.pids(), program.stacks)
        return standing if len(standing.reports) >= num_reports else None

    return wait_until(ask, "an answer")


@pytest.mark.parametrize(
    ("text", "waits", "name", "awaits"),
    [
        (ASYNCIO, "local_socket", "fetch-", "an item of an empty queue"),
        (IN_A_THREAD, "lock", "Task-", "a signal (Event or Condition)"),
    ],
)
def test_the_tasks_of_a_loop_are_listed_with_their_awaits(
    text: str, waits: str, name: str, awaits: str, tmp_path: Path
) -> None:
    with hanging(tmp_path, text, waits=waits) as program:
        place = f"{program.script}:{program.line()}"
        wait_until(lambda: place in str(answered(program)).replace("', line=", ":"), "the task")
        stacks = sample_stacks([program.pid], stacks_folder=program.stacks)
        (stack,) = with_reports(stacks, answered(program).reports)
        assert f"task '{name}" in stack.tasks[0]
        assert f"awaits {awaits} at {place}" in stack.tasks[0]
        lines = [thread.awaiting for thread in stack.threads if thread.awaiting]
        assert [f"{line.file}:{line.line}" for line in lines] == [place]


def test_a_worker_is_not_placed_at_a_line_of_its_parent_and_has_a_role(tmp_path: Path) -> None:
    with hanging(tmp_path, POOL, waits="lock") as program:
        wait_until(lambda: len(program.pids()) == 3, "two workers")
        workers = [pid for pid in program.pids() if pid != program.pid]

        def roles() -> set[str]:
            return {report.role for report in answered(program, 3).reports if report.pid in workers}

        wait_until(lambda: roles() == {"worker of a Pool"}, "both workers at their work")
        here = program.line()

        def places() -> set[int]:
            stacks = sample_stacks(workers, stacks_folder=program.stacks)
            found = [innermost_user_frame(stack.main) for stack in stacks]
            return {frame.line for frame in found if frame and frame.is_user}

        wait_until(lambda: here in places(), "the task")
        assert places() == {here}


FILELOCK = """
import filelock, os, time
os.chdir(os.environ["LOCKS"])
filelock.FileLock("data.lock").acquire()  # HERE
"""


def words_at_lock(tmp_path: Path, kind: str = "FileLock") -> str:
    """What a program says that tries the lock `data.lock` of a folder. The kernel shows a sleep, and no lock that
    anybody waits for."""
    with hanging(tmp_path / "work", FILELOCK.replace("FileLock", kind)) as program:
        standing = wait_until(lambda: at_file_lock(program), "the second try")
        stacks = sample_stacks([program.pid], stacks_folder=program.stacks)
        (stack,) = with_reports(stacks, standing.reports)
        return waiting_words(stack, Wait("sleep"))


def test_a_lock_that_is_tried_again_and_again_is_told_with_its_file_and_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKS", str(tmp_path))
    path = tmp_path / "data.lock"
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        words = words_at_lock(tmp_path)
    assert words.startswith(f"waiting for file lock '{path}', held by process {os.getpid()} (")


def test_a_lock_left_to_a_child_is_held_by_that_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKS", str(tmp_path))
    leaves = (
        "import fcntl, subprocess; fcntl.flock(9, fcntl.LOCK_EX); quiet = dict.fromkeys(('stdout', 'stderr'), -3); "
        "print(subprocess.Popen(['sleep', '1000'], pass_fds=[9], **quiet).pid)"
    )
    command = f'exec 9> "{tmp_path}/data.lock"; "{sys.executable}" -c "{leaves}"'
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, text=True, check=True)
    child = int(done.stdout)
    try:
        with open(tmp_path / "data.lock", "rb"):  # who only has it open, as one that tries it has, holds nothing
            words = words_at_lock(tmp_path)
        assert words.endswith(f"held by process {child} (sleep 1000)")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_that_is_only_a_file_accuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a path that would write to a screen."""
    folder = tmp_path / "a \x1b[31m\nfolder"
    folder.mkdir()
    monkeypatch.setenv("LOCKS", str(folder))
    (folder / "data.lock").write_text("4711\nfar-away")
    words = words_at_lock(tmp_path, "SoftFileLock")
    assert "(the file says '4711 far-away'); its holder is not visible here: it may run in another" in words
    assert "a  [31m folder" in words and "\n" not in words


def at_file_lock(program: Hanging) -> Standing | None:
    standing = read_standing([program.pid], program.stacks)
    kinds = [thread.waits.kind for report in standing.reports for thread in report.threads if thread.waits]
    return standing if kinds == ["file_lock"] else None


DYING = """
import multiprocessing, threading
def read(path):
    raise LookupError(f"{path} has no rows; see https://me:secret@hub.example/x")
def fold():
    try: int("x")
    except ValueError: raise RuntimeError("cannot fold")
if __name__ == "__main__":
    print("Exception in thread: none yet", flush=True)
    thread = threading.Thread(target=read, args=("a.csv",), name="reader 7"); thread.start(); thread.join()
    child = multiprocessing.get_context("fork").Process(target=fold, name="folder"); child.start(); child.join()
"""


def test_what_python_printed_of_threads_and_children_that_failed_is_known(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    with (tmp_path / "raw.out").open("wb") as out:
        command = [sys.executable, str(tmp_path / "dying.py")]
        subprocess.run(command, stdout=out, stderr=out, check=True, timeout=HANGS_S)
    thread, child = printed_endings(tmp_path)
    place = f"{tmp_path / 'dying.py'}:"
    assert thread.startswith("thread 'reader 7' has ended with LookupError: a.csv has no rows; see https://")
    assert thread.endswith(f" at {place}4") and "secret" not in thread
    assert child == f"process 'folder' has ended with RuntimeError: cannot fold at {place}7"
    assert printed_endings(tmp_path / "nowhere") == ()


def test_the_frames_of_the_parent_are_cut_off() -> None:
    own = Frame("work", "/me/a.py", 3, "", True)
    launch = Frame("_launch", "/usr/lib/python3.11/multiprocessing/popen_fork.py", 71)
    parent = Frame("<module>", "/me/a.py", 9, "", True)
    assert without_inherited(ThreadStack(1, "", (own, launch, parent))).frames == (own,)
    assert without_inherited(ThreadStack(1, "", (own, parent))).frames == (own, parent)


@pytest.mark.parametrize(
    ("file", "wait", "kind"),
    [
        ("/p/fsspec/asyn.py", "network 10.0.0.3:443", "network"),
        ("/lib/concurrent/futures/_base.py", "network 10.0.0.3:443", "network"),
        ("/p/fsspec/asyn.py", "network listening on 0.0.0.0:80", "lock"),
        ("/p/fsspec/asyn.py", "sleep", "lock"),
        ("/me/train.py", "network 10.0.0.3:443", "lock"),
    ],
)
def test_a_wait_for_a_thread_that_waits_for_the_network_is_network(file: str, wait: str, kind: str) -> None:
    main = ThreadStack(1, "MainThread", (Frame("sync", file, 1),), True, "lock")
    helper = ThreadStack(2, "fsspecIO", (Frame("select", "/lib/selectors.py", 1),), False, wait)
    found = effective_wait(ProcessStack(1, "", (main, helper)), Wait("lock"))
    assert found.kind == kind


def test_a_process_is_asked_after_a_standstill_and_then_ever_more_rarely() -> None:
    asked = AskedBefore(60.0)
    times = []
    for second in range(300):
        if asked.is_due(float(second), 0.0):
            asked.note(float(second))
            times.append(second)
    assert times[:4] == [5, 20, 43, 77]
    assert max(after - before for before, after in itertools.pairwise(times)) <= 61
    assert not AskedBefore(60.0).is_due(100.0, None)
    assert not AskedBefore(60.0).is_due(100.0, 97.0)


def test_file_locks_are_read_with_their_waiters() -> None:
    text = b"1: FLOCK  ADVISORY  WRITE 708 08:01:1234 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 709 08:01:1234 0 EOF\nx\n"
    assert read_file_locks(text) == [FileLock(1, 708, "08:01:1234", False), FileLock(1, 709, "08:01:1234", True)]


@pytest.mark.parametrize(
    "text",
    [
        "import ctypes\nctypes.PyDLL(None).sleep(10_000)\n",
        "import ctypes\nctypes.CDLL(None).usleep(1_000_000_000)\n",
        "import signal\nsignal.pause()\n",
    ],
)
def test_a_wait_that_a_signal_would_end_is_left_alone(text: str, tmp_path: Path) -> None:
    with hanging(tmp_path, text, waits="sleep") as program:
        for _ in range(3):
            assert read_standing([program.pid], program.stacks).reports == ()
        assert (program.process.poll(), program.wait_kind()) == (None, "sleep")


def test_a_sleep_of_python_is_asked_and_goes_on(tmp_path: Path) -> None:
    with hanging(tmp_path, "import time\ntime.sleep(10_000)\n", waits="sleep") as program:
        answered(program)
        wait_until(lambda: program.wait_kind() == "sleep", "its sleep")

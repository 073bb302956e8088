"""The supervisor sleeps while nothing happens, and wakes up when something does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jackline.rundir.process_id import ProcessId, identify
from jackline.supervisor.child.waking import EndWatch, Waker
from tests.deadline import HANGS_S

# Far longer than a test may take: a sleep that nothing ends shows as a hang.
NEVER_S = 10 * HANGS_S


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def known(process: subprocess.Popen[bytes]) -> ProcessId:
    found = identify(process.pid)
    assert found is not None
    return found


def test_processes_are_there_until_one_of_them_ends(sleeper: subprocess.Popen[bytes]) -> None:
    me = identify(os.getpid())
    assert me is not None
    watch = EndWatch([me, known(sleeper)])
    assert watch.are_all_there()
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not watch.are_all_there(), "a zombie has ended"


def test_a_process_that_had_ended_before_and_one_with_its_number_are_not_there(
    sleeper: subprocess.Popen[bytes],
) -> None:
    other = known(sleeper)
    assert not EndWatch([ProcessId(other.pid, other.start_ticks + 1, other.host, other.boot_id)]).are_all_there()
    sleeper.kill()
    sleeper.wait()
    assert not EndWatch([other]).are_all_there()


def test_without_descriptors_of_processes_nothing_is_claimed(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert not EndWatch([known(sleeper)]).are_all_there()


def test_output_ends_the_sleep_also_when_it_came_before(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    files = [tmp_path / "raw.out", tmp_path / "raw.err"]
    for file in files:
        file.touch()
    waker = Waker(files, EndWatch([known(sleeper)]))
    for file in files:
        with file.open("ab") as out:
            out.write(b"one line\n")
        waker.sleep(0.0, NEVER_S)
    # The sleep after it is not ended by the same lines.
    before_s = time.monotonic()
    waker.sleep(0.0, 0.3)
    assert time.monotonic() - before_s >= 0.25
    waker.close()


def test_an_end_and_a_signal_end_the_sleep(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    file = tmp_path / "raw.out"
    file.touch()
    waker = Waker([file], EndWatch([known(sleeper)]))
    heard: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
    child = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.kill({os.getpid()}, {int(signal.SIGUSR1)})"], stdin=subprocess.DEVNULL
    )
    try:
        while not heard:  # the signal may come before the sleep begins
            waker.sleep(0.0, NEVER_S)
    finally:
        signal.signal(signal.SIGUSR1, former)
        child.wait()
    sleeper.kill()
    waker.sleep(0.0, NEVER_S)
    waker.close()
    assert signal.set_wakeup_fd(-1) == -1, "the pipe is gone, so Python must not write to its number"


def test_a_file_that_cannot_be_watched_costs_the_sleep_nothing_but_its_length(tmp_path: Path) -> None:
    waker = Waker([tmp_path / "absent"], EndWatch([]))
    waker.sleep(0.0, NEVER_S)
    waker.sleep(-1.0, -1.0)
    waker.close()


def test_an_end_and_a_signal_end_even_the_least_sleep(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    file = tmp_path / "raw.out"
    file.touch()
    waker = Waker([file], EndWatch([known(sleeper)]))
    former = signal.signal(signal.SIGUSR1, lambda number, _frame: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        waker.sleep(NEVER_S, NEVER_S)
    finally:
        signal.signal(signal.SIGUSR1, former)
    sleeper.kill()
    waker.sleep(NEVER_S, NEVER_S)
    # Once the end is known the least sleep is kept: whoever waits for others must not turn in a circle.
    before_s = time.monotonic()
    waker.sleep(0.3, 0.3)
    assert time.monotonic() - before_s >= 0.25
    waker.close()

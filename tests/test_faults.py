"""The injector itself: a fault that does not strike must not pass for one that did."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import HANGS_S
from tests.faults import fail_at, kill_at, stall_at

WRITER = """
import os, sys
for number in range(5):
    with open("new", "w") as file: file.write(str(number))
    os.replace("new", os.path.join(sys.argv[1], "supervisor.json"))
"""


def run_writer(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WRITER, str(folder)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=HANGS_S)


def test_a_kill_strikes_before_the_nth_call(tmp_path: Path) -> None:
    with kill_at("state.replace", nth=3) as fault:
        done = run_writer(tmp_path, fault.in_child(os.environ))
        assert done.returncode == -signal.SIGKILL
        assert (tmp_path / "supervisor.json").read_text() == "1"
        assert len(fault.strikes()) == 1


def test_a_failure_raises_the_given_error_once(tmp_path: Path) -> None:
    with fail_at("state.replace", with_errno=errno.ENOSPC, nth=2) as fault:
        done = run_writer(tmp_path, fault.in_child(os.environ))
    assert done.returncode == 1
    assert done.stderr.endswith("OSError: [Errno 28] No space left on device\n")


def test_a_stall_lets_the_call_happen_afterwards(tmp_path: Path) -> None:
    with stall_at("state.replace", for_s=0.05, nth=5) as fault:
        done = run_writer(tmp_path, fault.in_child(os.environ))
    assert (done.returncode, (tmp_path / "supervisor.json").read_text()) == (0, "4")


def test_a_fault_that_never_strikes_fails_the_test(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"the fault at state\.replace never struck: the test verified nothing"),
        kill_at("state.replace", nth=6) as fault,
    ):
        assert run_writer(tmp_path, fault.in_child(os.environ)).returncode == 0

"""A helper that steps back must do so against the training, not only against its own session."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
CODE = """
import os
from jackline.machine.priority import step_back
step_back(7)
print(os.nice(0), open("/proc/self/autogroup").read().split()[-1])
"""

# Where they are switched off at boot the file is there and empty.
HAS_AUTOGROUPS = AUTOGROUP.exists() and bool(AUTOGROUP.read_text().strip())
needs_autogroups = pytest.mark.skipif(not HAS_AUTOGROUPS, reason="this kernel has no autogroups")


def ask(*, own_session: bool) -> list[int]:
    found = subprocess.run(
        [sys.executable, "-c", CODE], start_new_session=own_session, capture_output=True, text=True, check=True
    )
    return [int(word) for word in found.stdout.split()]


@needs_autogroups
def test_with_a_session_of_its_own_the_whole_session_steps_back() -> None:
    niceness = min(os.nice(0) + 7, 19)
    assert ask(own_session=True) == [niceness, niceness]


@needs_autogroups
def test_a_session_shared_with_others_keeps_its_weight() -> None:
    before = int(AUTOGROUP.read_text().split()[-1])
    assert ask(own_session=False) == [min(os.nice(0) + 7, 19), before]


def test_without_autogroups_it_is_only_nice(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from jackline.machine import priority
priority._AUTOGROUP = pathlib.Path({str(tmp_path)!r}, "not there", "autogroup")
priority.step_back(7)
print(os.nice(0))
"""
    found = subprocess.run([sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True)
    assert found.stdout.split() == [str(min(os.nice(0) + 7, 19))], found.stderr


@needs_autogroups
def test_several_helpers_of_a_person_at_once_all_step_back() -> None:
    """Only root may set weights as often as it likes; the others are told to come again."""
    refused = """
import os
from jackline.machine import priority
really, num_refused = os.write, 0
def write(fd, data):
    global num_refused
    if num_refused < 3:
        num_refused += 1
        raise BlockingIOError(11, "try again")
    return really(fd, data)
priority.os.write = write
priority.step_back(7)
print(num_refused, open("/proc/self/autogroup").read().split()[-1])
"""
    found = subprocess.run([sys.executable, "-c", refused], start_new_session=True, capture_output=True, text=True)
    assert found.stdout.split() == ["3", str(min(os.nice(0) + 7, 19))], found.stderr

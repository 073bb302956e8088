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

needs_autogroups = pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")


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

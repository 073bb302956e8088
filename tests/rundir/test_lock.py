"""One supervisor a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from jackline.rundir.lock import RunLock

HOLDER = """
import sys, time
from pathlib import Path
from jackline.rundir.lock import RunLock
assert RunLock(Path(sys.argv[1])).try_acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_one_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path / "lock"), RunLock(tmp_path / "lock")
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()
    second.release()  # once more does no harm


def test_a_killed_holder_lets_go(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        assert not RunLock(tmp_path / "lock").try_acquire()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    lock = RunLock(tmp_path / "lock")
    assert lock.try_acquire()
    lock.release()


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock")
    assert lock.try_acquire()
    child = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        lock.release()
        again = RunLock(tmp_path / "lock")
        assert again.try_acquire()
        again.release()
    finally:
        child.kill()
        child.wait()

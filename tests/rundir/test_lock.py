"""One supervisor a run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import identify
from tests.rundir.made import foreign_process, write_state

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


def no_flock(fd: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_flock_a_live_holder_keeps_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", no_flock)
    holder = subprocess.Popen(["sleep", "600"])
    try:
        (tmp_path / "lock").write_text(json.dumps(identify(holder.pid).to_json()))  # type: ignore[union-attr]
        assert not RunLock(tmp_path / "lock").try_acquire()
    finally:
        holder.kill()
        holder.wait()
    lock = RunLock(tmp_path / "lock")
    assert lock.try_acquire()
    lock.release()
    assert (tmp_path / "lock").read_text() == ""


@pytest.mark.parametrize(("age_s", "is_free"), [(1.0, False), (300.0, True)])
def test_without_flock_a_holder_elsewhere_counts_while_its_heartbeat_is_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, is_free: bool
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_flock)
    run = RunDir(tmp_path)
    write_state(run, foreign_process(), at_s=time.time() - age_s)
    run.lock.write_text(json.dumps(foreign_process().to_json()))
    assert RunLock(run.lock).try_acquire() is is_free


def test_without_flock_the_process_that_inherits_the_lock_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_flock)
    creator = RunLock(tmp_path / "lock")
    assert creator.try_acquire()
    (tmp_path / "lock").write_text(json.dumps(foreign_process().to_json()))
    heir = RunLock(tmp_path / "lock", creator.fd)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    heir.release()


def test_another_error_of_the_file_system_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(OSError, match="Input/output error"):
        RunLock(tmp_path / "lock").try_acquire()


def test_without_flock_a_live_writer_of_checkpoints_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_flock)
    holder = subprocess.Popen(["sleep", "600"])
    try:
        me = identify(holder.pid)
        assert me is not None
        (tmp_path / "lock").write_text(json.dumps({"writer": me.to_json(), "trainer": None, "phase": "idle"}))
        assert not RunLock(tmp_path / "lock").try_acquire()
    finally:
        holder.kill()
        holder.wait()
    assert RunLock(tmp_path / "lock").try_acquire()

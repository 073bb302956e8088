"""How a run's folder comes to be, for `run`, `train` and `attach`. Nothing else makes one.

A folder appears with a whole run.json or not at all. Its creator holds the run's lock from before the folder appears
until the first attempt is there. So a folder without an attempt whose lock is free was left by a creator that was
killed, and the next start claims it. Owns drafts and claims. Does not own what run.json says (run_file.py), nor the
start of the command.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from jackline.errors import UsageError
from jackline.rundir.identity import Existing
from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import host_name, read_start_ticks
from jackline.rundir.run_file import RunFile, read_run_file, write_run_file
from jackline.rundir.status import read_status

CLAIM_PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.05
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@dataclass(frozen=True)
class Claim:
    """A run that this process may start: its first attempt is nobody else's. The supervisor inherits the lock."""

    run: RunDir
    lock: RunLock

    def release(self) -> None:
        """The first attempt is there, or a supervisor holds the lock now."""
        self.lock.release()

    def abandon(self) -> None:
        """The start failed: without an attempt the folder goes, in one step."""
        if self.run.last_attempt() is None:
            draft = _draft_of(self.run)
            with contextlib.suppress(OSError):
                self.run.path.rename(draft)
                shutil.rmtree(draft, ignore_errors=True)
        self.lock.release()


def find_existing(run: RunDir) -> Existing | None:
    """What has the wanted name already. Raises DamagedRun for a folder that is something else."""
    if not run.path.exists():
        return None
    if is_unfinished(run):
        return Existing(run.name, "empty", {})
    state = read_status(run).state
    # Never started, but it holds something (records from a mirror, a checkpoint): that is resumed, not made anew.
    return Existing(run.name, "dead" if state == "empty" else state, read_run_file(run).settings)


def claim_run(run: RunDir, contents: RunFile, *, hint: str, patience_s: float = CLAIM_PATIENCE_S) -> Claim | None:
    """Make the folder, or take over an unfinished one. None when another process has started the run meanwhile.

    A creator at work is waited for. `hint` says how another place is chosen, where this one cannot be written.
    """
    until_s = time.monotonic() + patience_s
    try:
        _sweep_drafts(run)
        while True:
            claim = _take_over(run, contents) if os.path.lexists(run.path) else _make(run, contents)
            if claim is not None:
                return claim
            if os.path.lexists(run.path) and not is_unfinished(run):
                return None
            if time.monotonic() > until_s:
                break
            time.sleep(_LOOK_EVERY_S)
    except OSError as error:
        raise UsageError(f"cannot make a run in {run.path.parent}: {error.strerror}", hint=hint) from None
    raise UsageError(
        f"another process has been starting run '{run.name}' for {patience_s:.0f} s and has not started its command",
        hint="end that process (a stopped one holds the run too), or choose another --name",
    )


def is_unfinished(run: RunDir) -> bool:
    """True for a folder in which no command was started and which holds only what a start leaves before that."""
    try:
        entries = list(run.path.iterdir())
        return all(_is_of_the_start(run, entry) for entry in entries)
    except OSError:
        return False


def _is_of_the_start(run: RunDir, entry: Path) -> bool:
    if entry == run.attempts:
        return not any(entry.iterdir())
    known = (run.run_file, run.lock, run.supervisor_log, run.out_log, run.supervisor_events, run.mirror_file)
    return entry in known or re.fullmatch(r"\.(run|mirror)\.json\.\d+\.tmp", entry.name) is not None


def _make(run: RunDir, contents: RunFile) -> Claim | None:
    draft = RunDir(_draft_of(run))
    lock = RunLock(draft.lock)
    try:
        draft.path.mkdir(parents=True)
        lock.try_acquire()
        write_run_file(draft, contents)
        draft.path.rename(run.path)
    except OSError as error:
        lock.release()
        shutil.rmtree(draft.path, ignore_errors=True)
        if error.errno in _TAKEN and os.path.lexists(run.path):
            return None  # another start was quicker by an instant
        raise
    return Claim(run, lock)


def _take_over(run: RunDir, contents: RunFile) -> Claim | None:
    """A folder whose creator was killed. None while a creator is at work in it, and once it has begun."""
    if not is_unfinished(run):
        return None
    lock = RunLock(run.lock)
    try:
        if not lock.try_acquire():
            return None
    except FileNotFoundError:
        return None  # its creator has just taken it away
    # The folder may have begun, or gone, between the look and the lock.
    if not _is_in_place(lock, run) or not is_unfinished(run):
        lock.release()
        return None
    for leftover in run.path.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)
    write_run_file(run, contents)
    return Claim(run, lock)


def _is_in_place(lock: RunLock, run: RunDir) -> bool:
    try:
        return lock.fd is not None and os.path.samestat(os.fstat(lock.fd), run.lock.stat())
    except OSError:
        return False


def _draft_of(run: RunDir) -> Path:
    return run.path.with_name(f".{run.name}.{_host_word()}.{os.getpid()}.draft")


def _host_word() -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "-", host_name())


def _sweep_drafts(run: RunDir) -> None:
    """Drafts of this machine whose creator is gone."""
    for draft in run.path.parent.glob(f".{run.name}.{_host_word()}.*.draft"):
        pid = draft.name.split(".")[-2]
        if pid.isdigit() and (int(pid) == os.getpid() or read_start_ticks(int(pid)) is None):
            shutil.rmtree(draft, ignore_errors=True)

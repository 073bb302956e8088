"""Creates a run's folder, for `run`, `train`, `attach` and `resume MIRROR`, and removes it. No other code does.

A folder appears with a complete run.json or not at all. Its creator holds the run's lock from before the folder
appears until the first attempt exists. So a folder without an attempt whose lock is free was left by a creator that
was killed, and the next start claims it. Owns drafts and claims. Does not own what run.json says (run_file.py), nor
the start of the command.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from jackline.errors import UsageError
from jackline.immutable import immutable
from jackline.rundir.access.writing import make_private_folder
from jackline.rundir.command import plain_settings
from jackline.rundir.identity import Existing
from jackline.rundir.layout import RunDir
from jackline.rundir.lock import RunLock, acquire_after_finished
from jackline.rundir.process_id import host_name, read_start_ticks
from jackline.rundir.run_file import RunFile, read_run_file, write_run_file
from jackline.rundir.status import read_status

CLAIM_PATIENCE_S = 30.0
_LOOK_EVERY_S = 0.05
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@immutable
class Claim:
    """A run that only this process may start. The supervisor inherits the lock."""

    run: RunDir
    lock: RunLock

    def release(self) -> None:
        """Release the lock, once the first attempt exists or a supervisor holds the lock."""
        self.lock.release()

    def abandon(self) -> None:
        """The start failed: remove the folder in one step if it has no attempt."""
        if self.run.last_attempt() is None:
            with contextlib.suppress(OSError):
                _take_away(self.run)
        self.lock.release()


def find_existing(run: RunDir) -> Existing | None:
    """The run that already has this name. Raises DamagedRun for a folder that is not a run."""
    if not run.path.exists():
        return None
    if is_unfinished(run):
        return Existing(run.name, "empty", {})
    state = read_status(run).state
    # A run that was never started but holds files (records from a mirror, a checkpoint) is resumed, not recreated.
    return Existing(run.name, "dead" if state == "empty" else state, plain_settings(read_run_file(run).settings))


def claim_run(run: RunDir, contents: RunFile, *, hint: str, patience_s: float = CLAIM_PATIENCE_S) -> Claim | None:
    """Make the folder, or take over an unfinished one. None when another process has started the run meanwhile.

    Waits for another creator that is still working. `hint` is for the error when the place cannot be written: it says
    how to choose another.
    """
    until_s = time.monotonic() + patience_s
    try:
        _sweep_drafts(run)
        while True:
            claim = _take_over(run, contents) if os.path.lexists(run.path) else _make(run, lambda draft: contents)
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


def claim_filled(run: RunDir, fill: Callable[[RunDir], RunFile]) -> Claim:
    """Make the folder of a run that comes from a mirror. `fill` puts its files into a draft and returns its run.json.

    The folder appears with all of them, or not at all. Raises UsageError when there is a run with this name.
    """
    taken = UsageError(
        f"there is a run '{run.name}' in {run.path.parent} already", hint=f"jackline resume {run.name}"
    )
    if os.path.lexists(run.path):
        raise taken
    _sweep_drafts(run)
    claim = _make(run, fill)
    if claim is None:
        raise taken
    return claim


def remove_run(run: RunDir) -> None:
    """Delete the folder of an ended run. It disappears in one step, so a kill in between leaves no half of a run.

    Raises UsageError while a process of the run is alive, and OSError when the folder may not be changed.
    """
    lock, *inside = locks = [RunLock(path) for path in (run.lock, *_locks_inside(run))]
    try:
        is_free = acquire_after_finished(lock, run) and all([other.try_acquire() for other in inside])
        if read_status(run).state in ("alive", "unwatched"):
            raise UsageError(f"run '{run.name}' is alive", hint=f"end it first: jackline stop {run.name}")
        if not is_free:
            raise UsageError(
                f"run '{run.name}' is in use: a process still writes its checkpoints or uploads them",
                hint="try again when that is done",
            )
        _take_away(run)
    finally:
        for held in locks:
            held.release()


def _locks_inside(run: RunDir) -> list[Path]:
    """Of the checkpoint writer and of the mirrors, which may outlive the training."""
    known = (run.mirror_lock, *run.checkpoints.glob("*.lock"))
    return [path for path in known if path.exists()]


def _take_away(run: RunDir) -> None:
    if run.path.is_symlink():
        run.path.unlink()  # what it points to was put there by a person
        return
    draft = _draft_of(run)
    run.path.rename(draft)
    shutil.rmtree(draft)


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
    mirrors = (run.mirror_file, run.mirror_lock)
    known = (run.run_file, run.lock, run.supervisor_log, run.out_log, run.supervisor_events, *mirrors)
    return entry in known or re.fullmatch(r"\.(run|mirror)\.json\.\d+\.tmp", entry.name) is not None


def _make(run: RunDir, fill: Callable[[RunDir], RunFile]) -> Claim | None:
    draft = RunDir(_draft_of(run))
    lock = RunLock(draft.lock)
    try:
        make_private_folder(draft.path)
        lock.try_acquire()
        write_run_file(draft, fill(draft))
        draft.path.rename(run.path)
    except BaseException as error:
        lock.release()
        shutil.rmtree(draft.path, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _TAKEN and os.path.lexists(run.path):
            return None  # another start was faster
        raise
    return Claim(run, lock)


def _take_over(run: RunDir, contents: RunFile) -> Claim | None:
    """Claim a folder whose creator was killed. None while its creator still works, or once the run has started."""
    if not is_unfinished(run):
        return None
    lock = RunLock(run.lock)
    try:
        if not lock.try_acquire():
            return None
    except FileNotFoundError:
        return None  # its creator has just removed it
    # The run may have started, or its folder may have been removed, between the check and the lock.
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
    """Delete drafts of this machine whose creator has exited."""
    for draft in run.path.parent.glob(f".{run.name}.{_host_word()}.*.draft"):
        pid = draft.name.split(".")[-2]
        if pid.isascii() and pid.isdigit() and (int(pid) == os.getpid() or read_start_ticks(int(pid)) is None):
            shutil.rmtree(draft, ignore_errors=True)

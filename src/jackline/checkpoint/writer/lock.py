"""One writer per checkpoint folder, and what to do about one that outlived its trainer.

The lock is an flock, so the kernel releases it however the process ends. The file says who holds it and for which
trainer. A writer without a trainer is finishing a save and is waited for; a second writer for a running trainer is
refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jackline.immutable import immutable
from jackline.rundir.access.reading import read_json
from jackline.rundir.access.writing import open_own
from jackline.rundir.lock import RunLock
from jackline.rundir.process_id import ProcessId, host_name, identify, is_alive, liveness

POLL_S = 0.05
PATIENCE_S = 60.0  # seconds without any sign of work
_NOTE_BYTES = 1024


class AnotherWriter(Exception):
    """The writer of a running trainer holds the folder."""


@immutable
class Holder:
    """Who holds the lock, as far as the file is readable. `phase`: 'committing', 'idle' or 'closing'."""

    writer: ProcessId | None
    trainer: ProcessId | None
    phase: str


@immutable
class Orphan:
    """What is known of a writer whose trainer has exited.

    `idle_s`: seconds since it last used the processor or the disk.
    """

    phase: str
    is_stopped: bool
    idle_s: float


Treatment = Literal["wait", "continue", "ask to end", "kill"]


def treat_orphan(orphan: Orphan) -> Treatment:
    """Give it time, because it may hold the newest state there is; but a stuck one must not stop the run for ever."""
    if orphan.idle_s > PATIENCE_S:
        return "kill"
    if orphan.is_stopped:
        return "continue"
    return "wait" if orphan.phase == "committing" else "ask to end"


class WriterLock:
    """The lock of one `checkpoints` folder."""

    def __init__(self, path: Path, trainer: ProcessId | None) -> None:
        self._path = path
        self._trainer = trainer
        self._lock = RunLock(path)
        self._inode = 0

    def acquire(self, on_wait: Callable[[Holder], None]) -> None:
        """Wait for an orphan that makes progress; raise AnotherWriter when a running trainer's writer holds it."""
        watch = _Watch()
        while not self._lock.try_acquire():
            holder = read_holder(self._path)
            self._refuse_living(holder, watch.look(holder))
            on_wait(holder)
            _act_on(holder, watch)
            time.sleep(POLL_S)
        self._inode = self._path.stat().st_ino
        self.note("idle")

    def _refuse_living(self, holder: Holder, orphan: Orphan) -> None:
        if holder.writer is None and orphan.idle_s > PATIENCE_S:
            raise AnotherWriter(f"{self._path} is held by a process that does not say who it is")
        if holder.trainer is None or holder.trainer == self._trainer or liveness(holder.trainer) == "gone":
            return
        where = "" if holder.trainer.host == host_name() else f" on {holder.trainer.host}"
        raise AnotherWriter(f"process {holder.trainer.pid}{where} is already writing checkpoints into this run")

    def note(self, phase: str) -> None:
        """Write who holds the lock and what it is doing.

        Written in place, because the lock is on this very file, and padded to a fixed length, because a full disk
        must not make the text disappear.
        """
        me = identify(os.getpid())
        body = {
            "writer": me.to_json() if me else None,
            "trainer": self._trainer.to_json() if self._trainer else None,
            "phase": phase,
        }
        text = json.dumps(body).encode().ljust(_NOTE_BYTES - 1) + b"\n"
        fd = open_own(self._path, os.O_WRONLY)
        try:
            os.pwrite(fd, text, 0)
        finally:
            os.close(fd)

    def is_still_ours(self) -> bool:
        """False when the folder or the lock file was deleted: the lock then protects nothing any more."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def release(self) -> None:
        self._lock.release()


def read_holder(path: Path) -> Holder:
    body: Any = read_json(path)
    if not isinstance(body, dict):
        return Holder(None, None, "")
    return Holder(
        ProcessId.from_json(body.get("writer")), ProcessId.from_json(body.get("trainer")), str(body.get("phase"))
    )


class _Watch:
    """When a process last did any work, according to its counters in /proc."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._at_s = time.monotonic()

    def look(self, holder: Holder) -> Orphan:
        pid = holder.writer.pid if holder.writer else 0
        counters, is_stopped = read_work(pid)
        now_s = time.monotonic()
        if counters != self._seen:
            self._seen, self._at_s = counters, now_s
        return Orphan(holder.phase, is_stopped, now_s - self._at_s)


def _act_on(holder: Holder, watch: _Watch) -> None:
    if holder.writer is None or not is_alive(holder.writer):
        return  # the kernel is about to release the lock
    signals = {"continue": signal.SIGCONT, "ask to end": signal.SIGTERM, "kill": signal.SIGKILL}
    number = signals.get(treat_orphan(watch.look(holder)))
    if number is not None:
        with contextlib.suppress(OSError):
            os.kill(holder.writer.pid, number)


def read_work(pid: int) -> tuple[tuple[bytes, ...], bool]:
    """Counters that change whenever the process does any work, and whether it is stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        io = Path(f"/proc/{pid}/io").read_bytes()
    except OSError:
        return (), False
    fields = stat[stat.rfind(b")") + 2 :].split()
    return (fields[11], fields[12], io), fields[0] in (b"T", b"t")

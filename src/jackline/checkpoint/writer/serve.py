"""The process that writes checkpoints: `python -m jackline.checkpoint.writer.serve`.

It has no torch, a session of its own and the staged state as shared memory. So nothing the trainer does can damage a
staged save: if the trainer crashes, the writer still commits, then exits. It never blocks the trainer: it reads when
it can, and reports without waiting.
Owns the loop and the order of work. Does not own the save under way (intake.py), the commit (commit.py), the reading
back (upkeep.py) or the upload (upload.py, a separate process).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackline.checkpoint.format.catalogue import LOCK
from jackline.checkpoint.writer.commit import (
    DiskFull,
    OverBudget,
    Unacknowledged,
    clear_leftovers,
    require_budget,
    require_space,
)
from jackline.checkpoint.writer.disk import Disk, can_write_directly
from jackline.checkpoint.writer.intake import Intake
from jackline.checkpoint.writer.lock import AnotherWriter, Holder, WriterLock
from jackline.checkpoint.writer.parts import Team, clear_parts, note_failed, read_team
from jackline.checkpoint.writer.retention import Keep
from jackline.checkpoint.writer.upkeep import Upkeep
from jackline.checkpoint.writer.wire import Channel, Closed, Message
from jackline.immutable import immutable
from jackline.machine.disk import explain_refusal, used_bytes
from jackline.machine.priority import step_back
from jackline.rundir.process_id import ProcessId, identify, is_alive

if TYPE_CHECKING:  # stores and archives; only a run with a mirror needs them
    from jackline.checkpoint.mirror.process import MirrorProcess

NICENESS = 5  # a third of the training's CPU weight. With 10, saves came too late on a fully loaded machine
_MAKE_ROOM = "make room there (df -h, df -i), or make it writable, then start it again"
IDLE_POLL_S = 30.0
MAX_UNREAD = 2  # checkpoints that may wait to be read back when the next save begins
MIRROR_POLL_S = 5.0
GRACE_S = 1.0  # for the rest of a message whose sender has crashed


@immutable
class Options:
    """What the trainer decides at the start. `is_direct` None: find out by testing."""

    folder: Path
    trainer_pid: int
    keep: Keep = field(default_factory=Keep)
    is_direct: bool | None = None
    run: str = ""
    mirror: str | None = None
    mirror_every_s: float = 300.0
    disk_budget: int | None = None  # bytes; None: no limit but the disk itself
    mirror_patience_s: float = 600.0
    team: Team | None = None  # None: this writer writes whole checkpoints

    @property
    def is_part(self) -> bool:
        return self.team is not None and not self.team.is_first

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @staticmethod
    def from_json(text: str) -> Options:
        body = json.loads(text)
        team = read_team(body["team"]) if body.get("team") else None
        return Options(**{**body, "folder": Path(body["folder"]), "keep": Keep(**body["keep"]), "team": team})


class Writer:
    """The live state of the process."""

    def __init__(self, channel: Channel, options: Options, disk: Disk) -> None:
        self._channel = channel
        self._options = options
        self._disk = disk
        self._folder = options.folder
        self._trainer = identify(options.trainer_pid)
        self._trainer_fd = _open_pidfd(options.trainer_pid)
        self._lock = WriterLock(self._folder / LOCK, self._trainer)
        self._upkeep = Upkeep(self._folder, options.keep, disk, self._has_other_work)
        self._intake = Intake(self._folder, disk, self._make_room)
        self._mirror = self._new_mirror()
        self._is_making_room = False
        self._is_asked_to_end = False
        self._is_closing = False
        self._talking = threading.Lock()  # threads report the pieces they wrote

    def run(self) -> None:
        """Run until the trainer closes or has exited, and everything staged is committed."""
        self._alarm, waker = socket.socketpair()
        signal.signal(signal.SIGTERM, self._on_sigterm)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())  # otherwise a signal would not end a wait
        if not self._start():
            return
        try:
            while not (self._is_closing or self._is_asked_to_end):
                self._tend_mirror()
                message = self._next_message()
                if message is not None:
                    self._handle(message)
                elif not self._trainer_lives():
                    break
                elif not self._options.is_part and self._upkeep.has_work():
                    self._do_upkeep()
                else:
                    self._wait(IDLE_POLL_S)
            self._intake.drop()
            if self._is_closing:
                self._note("closing")
                if not self._options.is_part:
                    self._do_upkeep()
                    clear_parts(self._folder, "")
        except Closed:
            self._intake.drop()
        finally:
            self._lock.release()
            if self._mirror is not None:
                self._mirror.let_go()

    def _start(self) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(self._report_waiting())
            clear_leftovers(self._folder, self._disk)
            clear_parts(self._folder, self._options.team.token if self._options.team else "")
            wanted = self._options.is_direct
            self._intake.is_direct = can_write_directly(self._folder) if wanted is None else wanted
        except AnotherWriter as problem:
            self._report({"event": "refused", "why": str(problem)})
            return False
        except OSError as problem:
            why = explain_refusal(problem, self._folder)
            self._report({"event": "refused", "why": f"{self._folder} cannot be used: {why}", "hint": _MAKE_ROOM})
            return False
        self._upkeep.load()
        self._report({"event": "ready", "is_direct": self._intake.is_direct})
        self._tend_mirror()
        return True

    def _new_mirror(self) -> MirrorProcess | None:
        """A separate process, which exits by itself after this one: uploads must not delay a commit."""
        options = self._options
        if options.mirror is None:
            return None
        from jackline.checkpoint.mirror.engine import MirrorOptions
        from jackline.checkpoint.mirror.process import MirrorProcess
        from jackline.checkpoint.mirror.upload import mirror_command

        wanted = MirrorOptions(
            run=options.run,
            place=options.mirror,
            every_s=options.mirror_every_s,
            owner_pid=os.getpid(),
            folder=str(self._folder),
            patience_s=options.mirror_patience_s,
        )
        return MirrorProcess(mirror_command(), wanted)

    def _tend_mirror(self) -> None:
        """Start the mirror, and start another one when it was killed."""
        why = self._mirror.tend(time.monotonic()) if self._mirror is not None else ""
        if why:
            self._report({"event": "mirror_ended", "why": why})

    def _next_message(self) -> Message | None:
        """A whole message; waits a moment for the rest of one whose sender crashed while sending."""
        message = self._channel.receive()
        if message is None and not self._trainer_lives():
            self._channel.wait(GRACE_S)
            message = self._channel.receive()
        return message

    def _trainer_lives(self) -> bool:
        # Forked data workers may keep its socket open, so the process itself is checked.
        return is_alive(self._trainer)

    def _wait(self, timeout_s: float) -> None:
        """Wait for a message or the trainer's exit."""
        if self._channel.wait(0):
            return
        watched: list[Any] = [self._channel, self._alarm]
        if self._mirror is not None:
            watched += [self._mirror.fd] if self._mirror.fd is not None else []
            due_s = self._mirror.due_in_s(time.monotonic())
            timeout_s = min(timeout_s, MIRROR_POLL_S if due_s is None else max(0.01, due_s))
        if self._trainer_fd is not None:
            watched.append(self._trainer_fd)
        else:
            timeout_s = min(timeout_s, 1.0)
        if self._alarm in select.select(watched, [], [], timeout_s)[0]:
            self._alarm.recv(1 << 12)  # left there, it would end every later wait at once

    def _has_other_work(self) -> bool:
        if self._is_making_room or self._is_closing:
            return self._is_asked_to_end
        return self._is_asked_to_end or self._channel.wait(0)

    def _handle(self, message: Message) -> None:
        kind = message.body.get("op")
        if kind == "arena":
            self._intake.take_arena(message)
        elif kind in ("save", "end"):
            self._guarded(message, self._commit)
        elif kind == "begin":
            self._guarded(message, self._intake.begin)
        elif kind == "piece":
            self._intake.piece(message, self._report)
        elif kind == "cancel":
            self._intake.drop()
        elif kind == "damaged":
            self._report_all(self._upkeep.refuse(message.body["name"], message.body["why"]))
        elif kind == "mirror" and self._mirror is not None:
            self._mirror.ask(int(message.body["number"]))
        elif kind == "close":
            self._is_closing = True

    def _guarded(self, message: Message, work: Any) -> None:
        """Do one message's work; any error becomes a report, and the writer keeps running."""
        self._note("committing")
        try:
            self._ensure_folder()
            work(message)
        except DiskFull as problem:
            sizes = {"needed_bytes": problem.needed_bytes, "free_bytes": problem.free_bytes}
            self._fail(message, "the disk is full", problem=problem, **sizes)
        except OverBudget as problem:
            sizes = {"used_bytes": problem.used_bytes, "budget_bytes": problem.budget_bytes}
            self._fail(message, str(problem), problem=problem, **sizes)
        except Unacknowledged as problem:
            self._fail(message, str(problem.strerror), problem=problem)
        except OSError as problem:
            self._fail(message, explain_refusal(problem, self._folder), problem=problem)
        except (ValueError, AnotherWriter) as problem:
            self._fail(message, str(problem), problem=problem)
        if not self._intake.is_open:
            self._note("idle")

    def _commit(self, message: Message) -> None:
        done = self._intake.end(message)
        if done is None:
            return
        body = message.body
        said = {"event": "committed", "id": body["id"], "step": body["step"], "name": str(done.name)}
        self._report({**said, "size_bytes": done.size_bytes, "write_s": done.write_s})
        if self._options.is_part:
            return  # rank 0's writer takes it from here
        self._upkeep.acknowledge(done.name, done.size_bytes, done.write_s)

    def _make_room(self, payload_bytes: int) -> None:
        """Before a save: make sure that it fits, and that not too many are waiting to be read back.

        A loop that saves without a pause would otherwise fill the disk with checkpoints that nobody has read, and
        because of which nothing older may be deleted.
        """
        self._is_making_room = True  # reading back is not interrupted by the save that waits for it
        try:
            if not self._options.is_part and self._upkeep.num_unread() >= MAX_UNREAD:
                self._report_all(self._upkeep.work(most=1))
            try:
                self._require_room(payload_bytes)
            except (DiskFull, OverBudget):
                self._do_upkeep()
                self._shrink_to_budget(payload_bytes)
                self._require_room(payload_bytes)
        finally:
            self._is_making_room = False

    def _require_room(self, payload_bytes: int) -> None:
        require_space(self._folder, payload_bytes, self._disk)
        budget = self._options.disk_budget
        if budget is not None:
            require_budget(payload_bytes, used_bytes(self._folder, self._options.run or self._folder), budget)

    def _shrink_to_budget(self, payload_bytes: int) -> None:
        try:
            self._require_room(payload_bytes)
        except OverBudget:
            self._report_all(self._upkeep.prune(is_tight=True))
        except DiskFull:
            pass  # on a full disk the last two good ones stay

    def _ensure_folder(self) -> None:
        """Create the folder again if it was deleted while we run; the lock was deleted with it."""
        if self._lock.is_still_ours():
            return
        self._lock.release()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock.acquire(self._report_waiting())
        self._lock.note("committing")
        self._upkeep.load()
        self._report({"event": "folder_lost", "why": f"{self._folder} was deleted or emptied by somebody"})

    def _fail(self, message: Message, why: str, *, problem: BaseException, **more: Any) -> None:
        self._intake.drop(has_moved=isinstance(problem, Unacknowledged))
        number = problem.errno if isinstance(problem, OSError) else None
        body = message.body
        failed = {"event": "failed", "id": body.get("id"), "step": body.get("step"), "why": why, "errno": number}
        if self._options.is_part:
            with contextlib.suppress(OSError):
                note_failed(self._folder, body.get("team"), why)
        self._report({**failed, **more})

    def _do_upkeep(self) -> None:
        self._report_all(self._upkeep.work())

    def _report_all(self, reports: Iterable[dict[str, Any]]) -> None:
        for report in reports:
            self._report(report)

    def _note(self, phase: str) -> None:
        with contextlib.suppress(OSError):  # the folder was deleted; the save itself will notice
            self._lock.note(phase)

    def _report_waiting(self) -> Any:
        said: set[str] = set()

        def report(holder: Holder) -> None:
            if holder.phase not in said:
                said.add(holder.phase)
                self._report({"event": "waiting", "phase": holder.phase, "pid": _pid(holder.writer)})

        return report

    def _report(self, body: dict[str, Any]) -> None:
        with contextlib.suppress(Closed), self._talking:  # the trainer has gone; the commit still counts
            self._channel.send({**body, "at_s": time.time()})

    def _on_sigterm(self, *_: Any) -> None:
        self._is_asked_to_end = True


def _pid(process: ProcessId | None) -> int | None:
    return process.pid if process else None


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def main(arguments: list[str] | None = None, disk: Disk | None = None) -> None:
    """Arguments: the socket's file descriptor and the options as JSON."""
    words = sys.argv[1:] if arguments is None else arguments
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # these signals are meant for the trainer, not for the writer
    step_back(NICENESS)
    end = socket.socket(fileno=int(words[0]))
    Writer(Channel(end), Options.from_json(words[1]), disk or Disk()).run()


if __name__ == "__main__":
    main()

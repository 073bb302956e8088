"""Sends one save at a time from the trainer to the writer, and sends it again if the writer crashes.

The staged state stays in the arena until it is acknowledged. So when the writer crashes, a new one is started and
receives the same save again. A thread finishes the staging and sends, so the loop waits for neither.
Owns the current save and the events. Does not own what is saved (engine.py) or the process (writer_process.py).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jackline.checkpoint.staging.arena import Arena
from jackline.checkpoint.staging.handover import HandOver, Job, StateTooLarge, to_payload
from jackline.checkpoint.staging.writer_process import WriterProcess
from jackline.checkpoint.ticket import Event, Ticket, describe_report, room_text
from jackline.checkpoint.writer.lock import read_work
from jackline.checkpoint.writer.serve import Options
from jackline.errors import UsageError

MAX_RESTARTS = 3
READY_TIMEOUT_S = 900.0
LOOK_EVERY_S = 2.0
_WHO = "`jackline status` shows who is at work; stop that run first"


@dataclass
class WriterLink:
    """The writer as the engine uses it."""

    options: Options
    command: Sequence[str] = ()
    events: deque[Event] = field(default_factory=deque)
    job: Job | None = None
    is_ready: bool = False
    is_in_pieces: bool = False  # that there is no memory for a copy was told
    is_torn: bool = False  # the last overlapped copy was not exact
    why_off: str = ""
    written: set[int] = field(default_factory=set)  # pieces of a save that is sent in pieces
    refused: Job | None = None  # the last save, if it failed and its copy is still in the arena

    def __post_init__(self) -> None:
        self._arena: Arena | None = None
        self._hint = _WHO
        self._num_restarts = 0
        self._looked_at_s = time.monotonic()
        self._was_stopped = False
        self._pump_lock = threading.RLock()
        self._staged: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.writer = WriterProcess(self.options, self.command)
        threading.Thread(target=self._work, daemon=True, name="jackline-stage").start()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the folder is ours: the writer of the previous attempt may still be finishing its save."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready and time.monotonic() < deadline:
            if self.why_off:
                raise UsageError(self.why_off, hint=self._hint)
            self.pump(0.2)
        if not self.is_ready:
            raise UsageError(f"the checkpoint writer is not ready after {timeout_s:.0f} s")

    def share(self, arena: Arena) -> None:
        """From now on saves are in this memory."""
        self._arena = arena
        self.refused = None
        self._send_arena()

    def submit(self, job: Job) -> None:
        self.job = job
        self._staged.put(job)

    def submit_again(self, ticket: Ticket) -> bool:
        """Send the refused save once more, from the copy in the arena. False when there is no such copy."""
        job, self.refused = self.refused, None
        if job is None or self.job is not None or self.why_off:
            return False
        job.ticket, job.sent_to = ticket, None
        self.submit(job)
        return True

    def send(self, body: dict[str, Any], payload: bytes = b"") -> bool:
        return self.writer.send(body, payload)

    def pump(self, timeout_s: float = 0.0) -> None:
        """Process the writer's reports; start another writer when it has exited."""
        with self._pump_lock:
            for report in self.writer.reports(timeout_s):
                self._take(report)
            if self.writer.is_gone and not self.why_off:
                self._restart()
            job = self.job
            if job is not None and job.is_staged and job.sent_to is not self.writer:
                self._staged.put(job)
            if job is not None and time.monotonic() - self._looked_at_s > LOOK_EVERY_S:
                self._wake()

    def take_events(self) -> list[Event]:
        events: list[Event] = []
        while self.events:
            events.append(self.events.popleft())
        return events

    def fail(self, job: Job, why: str) -> None:
        self._end(job, "failed", why)
        self.events.append(
            Event("failed", f"step {job.ticket.step} could not be saved: {why}", job.ticket.step, True)
        )

    def close(self, timeout_s: float) -> bool:
        """Ask the writer to exit; return whether it did within the time. It finishes a save under way in any case."""
        self._staged.put(None)
        self.writer.send({"op": "close"}, timeout_s=1)
        is_over = self.writer.wait_end(timeout_s)
        for report in self.writer.reports():
            self._take(report)
        self.why_off = self.why_off or "the engine is closed"
        self.writer.let_go()
        return is_over

    def _wake(self) -> None:
        """Wake a stopped writer: it would leave the loop without checkpoints, or waiting, for ever.

        Acts when the writer was found stopped twice in a row.
        """
        self._looked_at_s = time.monotonic()
        was_stopped, (_, self._was_stopped) = self._was_stopped, read_work(self.writer.pid)
        if was_stopped and self._was_stopped:
            text = f"the checkpoint writer (process {self.writer.pid}) was stopped by a signal; waking it"
            self.events.append(Event("writer_woken", text, None, True))
            self.writer.wake()

    def _work(self) -> None:
        while (job := self._staged.get()) is not None:
            try:
                self._finish(job)
            except Exception as problem:  # fail open: the worst the loop may notice is a lost save
                self.fail(job, f"{type(problem).__name__}: {problem}")

    def _finish(self, job: Job) -> None:
        ahead = None
        if job.staging is not None:
            ahead = HandOver(self.writer, job, self._arena.address) if self._arena else None
            is_exact = job.staging.finish(ahead.up_to if ahead else lambda address: None)
            job.staging = None
            if not is_exact:
                self.is_torn = True
                if ahead:
                    ahead.cancel()
                self.fail(job, "a tensor changed while it was being copied; from now on saves wait for the copy")
                return
        if not job.payload:
            try:
                job.payload = to_payload(job.tree)
            except StateTooLarge as problem:
                if ahead:
                    ahead.cancel()
                self.fail(job, str(problem))
                return
        if job.ticket.is_over or job.sent_to is self.writer:
            return
        job.ticket.outcome = "writing"
        job.sent_to = self.writer
        job.is_staged = True
        if ahead is None or not ahead.finish(self.writer):
            self.writer.send(job.body, job.payload)  # if the writer has exited, `pump` starts another and sends again

    def _take(self, report: dict[str, Any]) -> None:
        kind = report.get("event")
        if kind == "piece":
            self.written.add(report["piece"])
            return
        if kind == "ready":
            self.is_ready, self._num_restarts = True, 0
        elif kind == "refused":
            self.why_off, self._hint = str(report.get("why")), str(report.get("hint") or _WHO)
        elif kind in ("committed", "failed"):
            self._settle(report)
        event = describe_report(report)
        if event is not None:
            self.events.append(event)

    def _settle(self, report: dict[str, Any]) -> None:
        job = self.job
        if job is None or report.get("id") != job.number:
            return
        job.ticket.name = str(report.get("name", ""))
        job.ticket.write_s = float(report.get("write_s", 0.0))
        job.ticket.room = room_text(report)
        self._end(job, str(report["event"]), str(report.get("why", "")))

    def _end(self, job: Job, outcome: Any, why: str = "") -> None:
        if job.ticket.is_over:
            return
        job.ticket.why = why
        if self.job is job:
            self.refused = job if outcome == "failed" and job.is_staged and job.payload else None
            self.job = None
        job.ticket.outcome = outcome

    def _restart(self) -> None:
        self.is_ready = False
        self._num_restarts += 1
        if self._num_restarts > MAX_RESTARTS:
            self.why_off = f"the checkpoint writer exited {self._num_restarts} times in a row"
            self.events.append(Event("off", f"checkpoints are off: {self.why_off}", None, True))
            if self.job is not None:
                self._end(self.job, "failed", self.why_off)
            return
        text = f"the checkpoint writer (process {self.writer.pid}) was lost; starting another"
        self.events.append(Event("writer_died", text, None, True))
        self.writer.wait_end(1.0)
        self.writer.let_go()
        self.writer = WriterProcess(self.options, self.command)
        self._send_arena()
        if self.job is not None and not self.job.tree:
            self._end(self.job, "failed", "the writer was lost")  # it was sent in pieces: nothing is left to resend

    def _send_arena(self) -> None:
        if self._arena is not None:
            self.writer.send({"op": "arena", "size_bytes": self._arena.size_bytes}, fd=self._arena.fd)

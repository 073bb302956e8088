"""The session's reports: session-RANK.json once a second, events, metrics, and lines for people.

A small thread writes all of them, so that a slow disk never delays a step. It also notices when a stop request meets
a step that does not end in time. Owns those three files and their contents. Decides nothing about training.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jackline.rundir.jsonl import JsonlWriter
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import identify
from jackline.rundir.records.event import EventRecord
from jackline.rundir.records.session import SessionRecord, write_session
from jackline.rundir.reserves import reserve_session
from jackline.session.home import read_grace_s
from jackline.session.metrics.scalars import MetricsFile, Scalars
from jackline.session.metrics.tensorboard import Curves
from jackline.session.phase import Phase, terminal_width
from jackline.units import fold, format_duration

if TYPE_CHECKING:
    from jackline.session.attachment import Attachment


EVERY_S = 1.0
_MAX_WAITING = 10_000  # events that a full disk has not taken yet


def say(text: str) -> None:
    """Print a line for the user on stderr. Never raises: stderr may be closed."""
    with contextlib.suppress(Exception):
        sys.stderr.write(fold(f"[jackline] {text}", terminal_width(os.environ), len("[jackline] ")) + "\n")
        sys.stderr.flush()


def keep_standard_descriptors() -> None:
    """Open file descriptors 0 to 2 that are closed.

    A script started with `2>&-` has no descriptor 2. The next file it opens would get that number, and messages for
    people would be written into it: once that file was the writer's socket.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # open() returns the lowest free number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


class Reporter:
    """One session's reports. `read_state` returns the contents of session-RANK.json."""

    def __init__(self, run: RunDir, rank: int, scalars: Scalars) -> None:
        self._run, self._rank = run, rank
        self._scalars = scalars
        self.read_state: Callable[[], SessionRecord] = SessionRecord
        self._events = JsonlWriter(run.session_events(rank))
        self._metrics = MetricsFile(JsonlWriter(run.metrics(rank)))
        self._curves = Curves(run, say, is_on=rank == 0)
        reserve_session(run, rank)
        self._waiting: deque[EventRecord] = deque(maxlen=_MAX_WAITING)
        self._wake = threading.Event()
        self._is_over = False
        self._thread: threading.Thread | None = None
        self._has_complained = False
        self.on_tick: list[Callable[[], None]] = []
        self.on_lines: list[Callable[[list[Any]], None]] = []

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, daemon=True, name="jackline-report")
        self._thread.start()

    def event(self, kind: str, text: str, *, is_loud: bool = False, **fields: Any) -> None:
        """Record an event, written soon; a loud one is also printed immediately."""
        self._waiting.append(EventRecord(time.time(), kind, text, fields))
        if is_loud:
            say(f"rank {self._rank}: {text}" if self._rank else text)

    def hurry(self) -> None:
        """Report now instead of waiting for the second to pass."""
        self._wake.set()

    def close(self) -> None:
        """Everything that is known is written when this returns."""
        self._is_over = True
        self._wake.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=10.0)
        self._scalars.send(float("inf"))
        self._tick(wait=True)
        self._curves.close()
        self._events.close()
        self._metrics.close()

    def _work(self) -> None:
        pid = os.getpid()
        while not self._is_over and os.getpid() == pid:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            if not self._is_over:
                self._tick()

    def _tick(self, *, wait: bool = False) -> None:
        try:
            lines = self._scalars.resolve(wait=wait)
            self._metrics.write(lines)
            self._curves.take(lines)
            for notice in self.on_lines:
                notice(lines)
            while self._waiting and self._events.append(self._waiting[0].to_json()):
                self._waiting.popleft()  # on a full disk they wait
            write_session(self._run, self._rank, self.read_state())
            for call in self.on_tick:
                call()
        except Exception as problem:  # a full disk, a deleted folder: training continues without reports
            if not self._has_complained:
                self._has_complained = True
                say(f"progress cannot be written ({type(problem).__name__}: {problem}); training continues")


_PATIENCE = 0.7  # share of the grace period after which a warning says that it will not be enough


class Outlook:
    """One session, seen from the thread that reports it."""

    def __init__(self, attached: Attachment) -> None:
        self._attached = attached
        self._bar: Phase | None = None
        self._has_warned = False

    def read_state(self) -> SessionRecord:
        """The contents of session-RANK.json. What a part adds beyond the record's fields is left out."""
        at = self._attached
        me, newest = identify(at.pid), at.saver.look_at_disk()
        found = {
            "at_s": time.time(),
            "process": me.to_json() if me else None,
            "attempt": at.home.attempt.number if at.home.attempt else None,
            **at.pulse.beat(time.monotonic(), at.stepper.steps_done),
            "spent_s": at.pulse.spent_s(),
            "step": at.stepper.steps_done,
            "epoch": at.position.epoch,
            "batch": at.position.batch,
            "place": self._place(),
            "best": at.saver.best(),
            "loss_bounds": at.saver.bounds(newest),
            "last_checkpoint": newest,
            "memory": {**at.gpu.read(), "host": at.host.read() if at.host is not None else None},
            "stop_requested_by": at.stop.by or None,
            "protections_off": [at.saver.why_off] if at.saver.why_off else [],
            "disk_budget": at.saver.engine.settings.disk_budget,
        }
        # As they are: a loss that is NaN is written as null, and a reader of the file must see that it was logged.
        return replace(SessionRecord.from_json(found), metrics=dict(at.scalars.latest))

    def look_around(self) -> None:
        """Once a second: report progress to the supervisor, and warn the user when stopping in time is unlikely."""
        at = self._attached
        if at.home.is_supervised and at.pulse.name == "train":
            self._bar = self._bar or Phase("train", None, total=at.pulse.total, unit="steps")
            self._bar.update(at.stepper.steps_done)
        if at.stop.is_made and not self._has_warned:
            waited_s = time.monotonic() - at.stop.at_s
            grace_s = read_grace_s(at.home.run, at.settings.grace_s)
            if waited_s > _PATIENCE * grace_s and not at.is_over:
                self._has_warned = True
                left = at.saver.what_stands(at.stepper.steps_done)
                text = (
                    f"{at.stop.by} came {format_duration(waited_s)} ago and this step has not ended; the grace is "
                    f"over after {format_duration(grace_s)}. If it is killed, {left}"
                )
                at.reporter.event("grace", text, is_loud=True)

    def _place(self) -> dict[str, Any]:
        """Which epoch of how many and which batch of how many, counted from 1.

        A loader's own counts replace these.
        """
        at = self._attached
        place = at.position
        own: dict[str, Any] = getattr(at.feed, "place", dict)()
        epochs = at.fingerprint["schedule"].get("epochs")
        return {
            "epoch": place.epoch + 1,
            "epochs": epochs,
            "batch": place.batch,
            "num_batches": at.feed.num_batches,
            **own,
        }

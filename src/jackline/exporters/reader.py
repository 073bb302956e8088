"""The one reader of all exporters: what is new in a run since the last delivery, and where that is recorded.

Owns `exports/NAME.json`: how far each file was read, the highest step that was sent of each metric, and which
messages were delivered. A step that is trained again after a crash is not sent again, so that no point is doubled.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from jackline.immutable import immutable
from jackline.review.redact import redact
from jackline.rundir import atomic
from jackline.rundir.access.writing import folder_inside, open_own
from jackline.rundir.jsonl import read_last, read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.records.event import EventRecord
from jackline.rundir.records.fields import decode, encode
from jackline.rundir.records.metrics import MetricsLine
from jackline.rundir.records.session import SessionRecord, read_session
from jackline.rundir.records.supervisor import read_supervisor
from jackline.rundir.run_file import DamagedRun, read_run_file

PORTION_BYTES = 1 << 20
MAX_BEHIND_BYTES = 512 << 20  # of a longer file only its end is sent: no run of ours comes near it
MAX_NAMES = 2000
_LAST_LINES = 50
MAX_DELIVERED = 400
MAX_NUMBERS = 4
MAX_TEXT = 600
SUPERVISOR, SESSION = "events-supervisor", "events-0"
# What a person is told about; the word is that of the message.
TOLD = {
    "stuck": "stuck",
    "died": "crashed",
    "finished": "done",
    "stopped": "stopped",
    "memory": "memory",
    "alarm": "alarm",
}
FIRST_STEP = "resumed"
EVENTS = (*TOLD.values(), FIRST_STEP)


@immutable
class ExportRecord:
    """exports/NAME.json. `marks`: the highest step sent of each metric. `trouble`: why the last delivery failed."""

    kind: str | None = None
    at_s: float | None = None
    offsets: dict[str, float] = field(default_factory=dict)
    marks: dict[str, float] = field(default_factory=dict)
    delivered: tuple[str, ...] = ()
    num_points: int = 0
    num_messages: int = 0
    watched_attempt: int | None = None
    watched_step: float | None = None
    told_attempt: int | None = None
    trouble: str | None = None


@immutable
class Points:
    """Numbers that were logged together."""

    values: Mapping[str, float]
    step: float | None
    at_s: float | None


@immutable
class Message:
    """One event in words. `id` is the same however often it is sent."""

    id: str
    event: str
    text: str
    at_s: float
    attempt: int | None = None
    step: float | None = None
    total: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@immutable
class Batch:
    points: tuple[Points, ...] = ()
    messages: tuple[Message, ...] = ()
    is_more: bool = False

    def __bool__(self) -> bool:
        return bool(self.points or self.messages)


@immutable
class About:
    """What a tracker is told about a run when it opens. `id` stays the same when the run moves to another machine."""

    id: str
    name: str
    command: str = ""
    created_at_s: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


def about_run(run: RunDir) -> About:
    try:
        contents = read_run_file(run)
    except (DamagedRun, OSError):
        return About(_digest(run.name), run.name)
    facts = {"command": redact(contents.command), "host": contents.host, "commit": str(contents.git.get("commit"))}
    identity = _digest(f"{contents.name} {contents.created_at_s} {contents.host}")
    return About(identity, contents.name, redact(contents.command), contents.created_at_s, facts)


def export_name(kind: str, target: str) -> str:
    """The name of the files of one exporter. The target may hold a secret, so only its digest is used."""
    return f"{kind}-{_digest(target)[:8]}"


class Reader:
    """Reads on in one run for one exporter. `read` may be called again and again; only `commit` moves on."""

    def __init__(self, run: RunDir, name: str, kind: str) -> None:
        self.run = run
        self.path = run.path / "exports" / f"{name}.json"
        self._lock_fd = -1
        self.record = replace(decode(ExportRecord, atomic.read_json(self.path)), kind=kind, trouble=None)
        self._next = self.record
        self._known: set[str] = set()
        self._has_looked = False

    def try_lock(self) -> bool:
        """False when another process exports this run to the same place."""
        folder_inside(self.path.parent)
        self._lock_fd = open_own(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True  # a file system without flock: better twice than never
        return True

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def raise_marks(self, marks: Mapping[str, float]) -> None:
        """What the other side already has, for example because our last record of it was lost."""
        known = self.record.marks
        self.record = replace(self.record, marks={**known, **{n: max(s, known.get(n, s)) for n, s in marks.items()}})

    def read(self, *, points: bool, events: frozenset[str]) -> Batch:
        self._next = self.record
        found = self._read_points() if points else Batch()
        messages = self._read_messages(events) if events else ()
        return replace(found, messages=tuple(messages))

    def commit(self) -> None:
        """The last batch was delivered."""
        self.record = self._next
        self._write()

    def commit_message(self, message: Message) -> None:
        """One message of the batch was delivered: it is not sent again, even if the others fail."""
        self.record = _delivered(self.record, message)
        self._next = _delivered(self._next, message)
        self._write()

    def note_trouble(self, text: str) -> None:
        self.record = replace(self.record, trouble=text[:MAX_TEXT])
        self._write()

    def _write(self) -> None:
        self.record = replace(self.record, at_s=round(time.time(), 3))
        atomic.write_json(self.path, encode(self.record), durable=False)

    def _read_points(self) -> Batch:
        found: list[Points] = []
        is_more = False
        if not self._has_looked:  # started again, behind the lines that would tell
            self._has_looked = True
            for raw in read_last(self.run.metrics(), _LAST_LINES):
                self._known.update(MetricsLine.from_json(raw).values)
        # What a loop logs counts; of what was only printed, the names that it does not log.
        for path, is_printed in ((self.run.metrics(), False), (self.run.printed_metrics, True)):
            lines, is_cut = self._lines(path)
            is_more = is_more or is_cut
            for line in map(MetricsLine.from_json, lines):
                if is_printed:
                    values = {name: value for name, value in line.values.items() if name not in self._known}
                else:
                    self._known.update(line.values)
                    values = dict(line.values)
                if values := self._new(values, line.step):
                    found.append(Points(values, line.step, line.at_s))
        self._next = replace(self._next, num_points=self._next.num_points + len(found))
        return Batch(tuple(found), is_more=is_more)

    def _new(self, values: dict[str, float], step: float | None) -> dict[str, float]:
        """Without what was sent already: a step trained again after a crash has the same numbers."""
        if step is None:
            return values
        marks = self._next.marks
        fresh = {name: value for name, value in values.items() if step > marks.get(name, float("-inf"))}
        if fresh and len(marks) < MAX_NAMES:
            self._next = replace(self._next, marks={**marks, **dict.fromkeys(fresh, step)})
        return fresh

    def _lines(self, path: Path) -> tuple[Sequence[dict[str, Any]], bool]:
        offset = int(self._next.offsets.get(path.name, 0))
        try:
            size = path.stat().st_size
        except OSError:
            return (), False
        if size < offset:
            offset = 0  # another file by the same name: the marks say what of it was sent
        offset = max(offset, size - MAX_BEHIND_BYTES)
        lines = read_lines(path, offset, max_bytes=PORTION_BYTES)
        self._next = replace(self._next, offsets={**self._next.offsets, path.name: lines.next_offset})
        return lines.records, lines.next_offset > offset and lines.next_offset < size

    def _read_messages(self, wanted: frozenset[str]) -> Iterable[Message]:
        session = read_session(self.run)
        found = [message for message in self._told_events(session) if message.event in wanted]
        first = self._first_step(session)
        if first is not None and FIRST_STEP in wanted:
            found.append(first)
        found.sort(key=lambda message: message.at_s)
        return [message for message in found if message.id not in self.record.delivered]

    def _told_events(self, session: SessionRecord) -> Iterable[Message]:
        for path in (self.run.supervisor_events, self.run.session_events(0)):
            lines, _ = self._lines(path)
            for event in map(EventRecord.from_json, lines):
                if event.event in TOLD and event.at_s is not None:
                    yield self._message(TOLD[event.event], event.text or "", event.at_s, session, event.attempt)

    def _first_step(self, session: SessionRecord) -> Message | None:
        """The first step of an attempt after the first: the resume has worked."""
        state = read_supervisor(self.run)
        attempt = state.attempt or session.attempt
        is_current = session.done is not None and session.attempt in (None, attempt)
        step = session.progress.done if is_current else state.progress.done
        before = self._next
        if attempt is None or attempt < 2 or step is None or before.told_attempt == attempt:
            return None
        if before.watched_attempt != attempt or before.watched_step is None:
            self._next = replace(before, watched_attempt=attempt, watched_step=step)
            return None
        if step <= before.watched_step:
            return None
        self._next = replace(before, told_attempt=attempt)
        text = f"attempt {attempt} trains again: step {step:,.0f}"
        return self._message(FIRST_STEP, text, time.time(), session, attempt, key=f"attempt {attempt}")

    def _message(
        self, event: str, text: str, at_s: float, session: SessionRecord, attempt: int | None, key: str = ""
    ) -> Message:
        identity = _digest(f"{self.run.name} {event} {key or f'{at_s} {text}'}")[:16]
        state = read_supervisor(self.run)
        progress = session.progress if session.done is not None else state.progress
        printed = {entry.name: entry.value for entry in state.printed if entry.name and entry.value is not None}
        metrics = dict(list((session.metrics or printed).items())[:MAX_NUMBERS])
        step = session.step if session.step is not None else progress.done
        total = None if progress.is_part else progress.total
        lines = "\n".join(line.strip() for line in redact(text).splitlines())
        return Message(identity, event, lines[:MAX_TEXT], at_s, attempt, step, total, metrics)


def _delivered(record: ExportRecord, message: Message) -> ExportRecord:
    delivered = (*record.delivered, message.id)[-MAX_DELIVERED:]
    return replace(record, delivered=delivered, num_messages=record.num_messages + 1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]

"""The mirror's progress, read from its notes, and how much work would be lost right now. Torch-free, cheap."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.manifest import Name, is_left_behind
from jackline.checkpoint.ticket import Event, describe_report
from jackline.immutable import immutable
from jackline.rundir.records.mirror import MirrorRecord, read_mirror
from jackline.units import format_bytes, format_duration

LOOK_EVERY_S = 1.0
_STARTS_S = 60.0  # until a process that was just started has written for the first time


@immutable
class LossBounds:
    """How much work is lost if the process crashes now, and if the machine does. None: everything since the start."""

    process_s: float | None
    machine_s: float | None
    mirror_state: str = "local"

    def text(self) -> str:
        process = _lost(self.process_s)
        how = "" if self.machine_s is None else f" (last upload, {_sure(self.mirror_state)})"
        return f"at risk: {process}; if the machine is lost, {_lost(self.machine_s)}{how}"


@immutable
class Left:
    """A checkpoint that the mirror does not have yet. `newest` is the newest that it has."""

    name: str
    done_bytes: int = 0
    total_bytes: int | None = None
    newest: str = ""
    why: str = ""  # why the last try failed

    def text(self) -> str:
        of = "" if self.total_bytes is None else f" of {format_bytes(self.total_bytes)}"
        text = f"{self.name} is not in the mirror yet: {format_bytes(self.done_bytes)}{of} uploaded"
        text += f"; the newest there is {self.newest}" if self.newest else "; nothing of this run is there"
        return text + (f" ({self.why})" if self.why else "")


def left_of(record: MirrorRecord, name: str | None, size_bytes: int | None, newest: str) -> Left | None:
    """What `record` says about the upload of `name`, the newest checkpoint of the run; None when it is done."""
    if name is None or record.has(name):
        return None
    why = record.trouble.why or ""
    if record.uploading.name != name:
        return Left(name, 0, size_bytes, newest, why)
    return Left(name, record.uploading.done_bytes or 0, record.uploading.total_bytes or size_bytes, newest, why)


def read_left(folder: Path) -> Left | None:
    """What the mirror lacks of Jackline's checkpoints in `folder`; None when it has the newest."""
    record = read_mirror(folder / catalogue.MIRROR)
    listed = next((entry for entry in catalogue.list_checkpoints(folder) if entry.is_plausible), None)
    if listed is None or listed.manifest is None:
        return None
    rewinds = catalogue.list_rewinds(folder)
    uploads = [name for name in catalogue.read_uploads(folder) if not is_left_behind(name, rewinds)]
    newest = str(max(uploads)) if uploads else ""
    return left_of(record, str(listed.name), listed.manifest.size_bytes, newest)


class UploadWait:
    """Waits for the answer to one request for the last upload, without sleeping. Times are monotonic."""

    def __init__(self, number: int, patience_s: float, now_s: float) -> None:
        self._number = number
        self._patience_s = patience_s
        self._moved_at_s = now_s
        self._starts_until_s = now_s + _STARTS_S
        self._done: tuple[object, ...] = ()
        self._furthest: dict[str, int] = {}

    def look(
        self, record: MirrorRecord, now_s: float, *, pid: int | None = None
    ) -> Literal["done", "waiting", "given up"]:
        """'given up': nothing got ahead for the whole patience, which begins when the process `pid` has written.

        A try that fails and begins again gets ahead only when it comes further than every try before it.
        """
        if record.answered >= self._number:
            return "done"
        name, done_bytes = record.uploading.name or "", record.uploading.done_bytes or 0
        if record.done != self._done or done_bytes > self._furthest.get(name, 0):
            self._done, self._moved_at_s = record.done, now_s
            self._furthest[name] = max(done_bytes, self._furthest.get(name, 0))
        is_starting = pid is not None and (record.process is None or record.process.pid != pid)
        if is_starting and now_s < self._starts_until_s:
            self._moved_at_s = now_s  # what the record says is from a process before it
        return "given up" if now_s - self._moved_at_s >= self._patience_s else "waiting"


class MirrorWatch:
    """Turns changes of mirror.json into events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked_at_s = 0.0
        self._seen: dict[Name, str] = {}
        self._trouble: str | None = None
        self.newest: tuple[float, str] | None = None  # when its state was saved, and 'uploaded' or 'confirmed'
        self._newest_name: Name | None = None
        self._newest_at_s = 0.0  # monotonic

    def look(self, now_s: float) -> list[Event]:
        if now_s - self._looked_at_s < LOOK_EVERY_S:
            return []
        self._looked_at_s = now_s
        record = read_mirror(self._folder / catalogue.MIRROR)
        if not record.is_there:
            return []
        reports: list[dict[str, Any]] = []
        rewinds = catalogue.list_rewinds(self._folder)
        for name, upload in sorted(catalogue.read_uploads(self._folder).items()):
            if is_left_behind(name, rewinds):
                continue
            state = str(upload.state)
            self.newest = (upload.saved_at_s or 0.0, state)
            if self._newest_name is None or name > self._newest_name:
                self._newest_name, self._newest_at_s = name, now_s
            if self._seen.get(name) != state:
                self._seen[name] = state
                reports.append({"event": "mirrored", "name": str(name), "step": name.step, "state": state})
        if record.trouble.why and record.trouble.why != self._trouble:
            reports.append({"event": "mirror_failed", "why": record.trouble.why})
        self._trouble = record.trouble.why
        events = (describe_report(report) for report in reports)
        return [event for event in events if event is not None]

    def known_s(self, now_s: float) -> float:
        """Seconds since the newest upload was first seen, on the monotonic clock that is passed to `look`."""
        return now_s - self._newest_at_s if self._newest_name is not None else 0.0


def machine_loss(
    newest: tuple[float, str] | None, now_s: float | None = None, known_s: float = 0.0
) -> tuple[float | None, str]:
    """Seconds of work that exist only on this machine, and the state of the mirror's newest copy.

    `known_s`: how long that upload has been known, by a clock that never jumps. The loss is at least that.
    """
    if newest is None:
        return None, "local"
    now = time.time() if now_s is None else now_s
    return max(known_s, now - newest[0]), newest[1]


def _lost(seconds: float | None) -> str:
    return "everything since the start" if seconds is None else format_duration(seconds)


def _sure(state: str) -> str:
    return "confirmed" if state == "confirmed" else "unconfirmed"

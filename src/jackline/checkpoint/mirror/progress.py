"""The mirror's progress, read from its notes, and how much work would be lost right now. Torch-free, cheap."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackline.checkpoint.format import catalogue
from jackline.checkpoint.format.manifest import Name, is_left_behind
from jackline.checkpoint.ticket import Event, describe_report
from jackline.rundir import atomic
from jackline.units import format_duration

LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class LossBounds:
    """How much work is lost if the process crashes now, and if the machine does. None: everything since the start."""

    process_s: float | None
    machine_s: float | None
    mirror_state: str = "local"

    def text(self) -> str:
        process = _lost(self.process_s)
        how = "" if self.machine_s is None else f" (last upload, {_sure(self.mirror_state)})"
        return f"at risk: {process}; if the machine is lost, {_lost(self.machine_s)}{how}"


class MirrorWatch:
    """Turns changes of mirror.json into events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looked_at_s = 0.0
        self._seen: dict[Name, str] = {}
        self._trouble: Any = None
        self.newest: tuple[float, str] | None = None  # when its state was saved, and 'uploaded' or 'confirmed'
        self._newest_name: Name | None = None
        self._newest_at_s = 0.0  # monotonic

    def look(self, now_s: float) -> list[Event]:
        if now_s - self._looked_at_s < LOOK_EVERY_S:
            return []
        self._looked_at_s = now_s
        body = atomic.read_json(self._folder / catalogue.MIRROR)
        if not isinstance(body, dict):
            return []
        reports = []
        notes = catalogue.read_notes(self._folder, catalogue.MIRROR)
        rewinds = catalogue.list_rewinds(self._folder)
        for name, note in sorted(notes.items()):
            if is_left_behind(name, rewinds):
                continue
            state = str(note.get("state"))
            self.newest = (float(note.get("saved_at_s", 0.0)), state)
            if self._newest_name is None or name > self._newest_name:
                self._newest_name, self._newest_at_s = name, now_s
            if self._seen.get(name) != state:
                self._seen[name] = state
                reports.append({"event": "mirrored", "name": str(name), "step": name.step, "state": state})
        trouble = body.get("trouble")
        if isinstance(trouble, dict) and trouble.get("why") and trouble.get("why") != self._trouble:
            reports.append({"event": "mirror_failed", "why": trouble["why"]})
        self._trouble = trouble.get("why") if isinstance(trouble, dict) else None
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

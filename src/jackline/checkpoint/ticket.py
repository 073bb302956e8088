"""The outcome of a save, and events about checkpoints. Data only, and their text for people."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jackline.units import format_bytes, format_duration

Outcome = Literal["staging", "writing", "committed", "failed", "skipped"]


@dataclass
class Ticket:
    """One save. `outcome` 'committed' means acknowledged: it survives kill -9 and a power cut.

    `stall_s` is what it cost the loop: the call itself and the wait at the barrier.
    """

    step: int
    outcome: Outcome = "staging"
    why: str = ""
    name: str = ""
    stall_s: float = 0.0
    write_s: float = 0.0
    size_bytes: int = 0
    room: str = ""  # ' (1.2 GiB needed, 0 B free)' of one that failed for want of it
    _pump: Callable[[float], None] = field(default=lambda timeout_s: None, repr=False)

    @property
    def is_over(self) -> bool:
        return self.outcome in ("committed", "failed", "skipped")

    def wait(self, timeout_s: float = 3600.0) -> bool:
        """Wait until the save is acknowledged or lost; return whether it was acknowledged."""
        deadline = time.monotonic() + timeout_s
        while not self.is_over and time.monotonic() < deadline:
            self._pump(min(0.2, max(0.0, deadline - time.monotonic())))
        return self.outcome == "committed"


@dataclass(frozen=True)
class Event:
    """An entry for the run's events. `is_loud`: a person should see it now."""

    kind: str
    text: str
    step: int | None = None
    is_loud: bool = False
    at_s: float = field(default_factory=time.time)
    fields: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "at_s": self.at_s,
            "kind": f"checkpoint_{self.kind}",
            "step": self.step,
            "text": self.text,
            **self.fields,
        }


def describe_report(report: dict[str, Any]) -> Event | None:
    """The writer's report as an event; None for one that does not interest people."""
    kind, step = str(report.get("event")), report.get("step")
    words = _WORDS.get(kind)
    if words is None:
        return None
    text, is_loud = words
    values = {**report, "size": _size(report), "took": _took(report), "room": room_text(report)}
    fields = {key: value for key, value in report.items() if key not in ("event", "step", "at_s", "id")}
    at_s = report.get("at_s")
    return Event(
        kind=kind,
        text=text.format_map(_Blank(values)),
        step=step if isinstance(step, int) else None,
        is_loud=is_loud,
        at_s=at_s if isinstance(at_s, int | float) else time.time(),
        fields=fields,
    )


_WORDS = {
    "committed": ("saved {name}: {size} in {took}", False),
    "failed": ("step {step} could not be saved: {why}{room}; training continues without this checkpoint", True),
    "verified": ("read back {name}: whole", False),
    "damaged": ("{name} is damaged and was set aside: {why}", True),
    "unreadable": ("{name} cannot be read back now: {why}", True),
    "deleted": ("deleted {name}", False),
    "waiting": ("waiting for the writer of the attempt before (process {pid}, {phase})", True),
    "refused": ("checkpoints are off: {why}", True),
    "folder_lost": ("{why}; earlier checkpoints are gone, saving continues", True),
    "mirrored": ("uploaded {name} to the mirror ({state})", False),
    "mirror_ended": ("the mirror stopped: {why}; starting another", True),
    "mirror_failed": ("the mirror cannot be reached: {why}; trying again", True),
}


class _Blank(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"


def _size(report: dict[str, Any]) -> str:
    return format_bytes(report.get("size_bytes", 0))


def _took(report: dict[str, Any]) -> str:
    return format_duration(report.get("write_s", 0.0))


def room_text(report: dict[str, Any]) -> str:
    if "needed_bytes" not in report:
        return ""
    return f" ({format_bytes(report['needed_bytes'])} needed, {format_bytes(report['free_bytes'])} free)"

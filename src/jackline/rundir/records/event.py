"""A line of events-supervisor.jsonl and events-RANK.jsonl: one event, with a text and facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from jackline.immutable import immutable
from jackline.rundir.records.fields import decode, integer


@immutable
class EventRecord:
    """One event. `facts` are its other fields: cause, exit_code, path ..."""

    at_s: float | None = None
    event: str | None = None
    text: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def attempt(self) -> int | None:
        return integer(self.facts.get("attempt"))

    @staticmethod
    def from_json(raw: object) -> EventRecord:
        own = {"Mapping[str, Any]": lambda value: None}
        found = decode(EventRecord, raw, own)
        facts = raw if isinstance(raw, dict) else {}
        more = {name: value for name, value in facts.items() if name not in ("at_s", "event", "text")}
        return EventRecord(found.at_s, found.event, found.text, more)

    def to_json(self) -> dict[str, Any]:
        return {"at_s": self.at_s, "event": self.event, "text": self.text, **self.facts}

"""intent.json: why an attempt exits on purpose, whether it asks for a restart, and with which settings.

Owns the file's format. Written by the session (or trainer) inside the attempt, read by the supervisor's policy and by
the next attempt's session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from jackline.immutable import immutable
from jackline.rundir import atomic
from jackline.rundir.layout import AttemptDir
from jackline.rundir.records.fields import mapping, text


@immutable
class Intent:
    """`settings` are for the next attempt, for example {'num_workers': 2, 'prefetch': 1}.

    `is_unsaved`: training was done, but its last state could not be saved, so the run is not finished.
    """

    restart: bool
    why: str
    settings: dict[str, Any] = field(default_factory=dict)
    is_unsaved: bool = False

    @staticmethod
    def from_json(raw: object) -> Intent | None:
        """None for a damaged file: the session may have been killed while it wrote."""
        found = raw if isinstance(raw, dict) else {}
        restart, why, settings = (found.get(name) for name in ("restart", "why", "settings"))
        if not isinstance(restart, bool):
            return None
        return Intent(restart, text(why) or "", mapping(settings) or {}, found.get("is_unsaved") is True)

    def to_json(self) -> dict[str, Any]:
        unsaved = {"is_unsaved": True} if self.is_unsaved else {}
        return {"restart": self.restart, "why": self.why, "settings": self.settings, **unsaved}


def write_intent(
    attempt: AttemptDir | None,
    *,
    restart: bool,
    why: str,
    settings: Mapping[str, Any] | None = None,
    is_unsaved: bool = False,
) -> bool:
    """Write and sync, because the process may be killed next. False without an attempt, or when the disk refuses;
    the exit continues without it."""
    if attempt is None:
        return False
    try:
        contents = Intent(restart, why, dict(settings or {}), is_unsaved)
        atomic.write_json(attempt.intent_file, contents.to_json(), durable=True)
    except OSError:
        return False
    return True


def read_intent(attempt: AttemptDir) -> Intent | None:
    return Intent.from_json(atomic.read_json(attempt.intent_file))

"""What a run printed and what happened to it, read on from a cursor, never more than a bounded part at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jackline.review.redact import redact
from jackline.review.summary import TOLD
from jackline.rundir.access.reading import read_end, read_part, read_text
from jackline.rundir.jsonl import read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.records.event import EventRecord

LOG_BYTES = 64 << 10
SEARCHED_BYTES = 16 << 20
MAX_MATCHES = 200
MAX_LINE = 2000
MAX_EVENTS = 300
EVENT_BYTES = 4 << 20
MAX_INCIDENT_BYTES = 64 << 10
MAX_INCIDENTS = 5
# Escape sequences and control characters; a tab stays.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Marks that reverse or hide text.
_HIDDEN = re.compile(
    "[\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)
WARNINGS = frozenset(
    {"verdict", "stuck", "incident", "memory", "restart", "died", "mirror_failed", "not_mirrored",
     "checkpoint_failed", "checkpoint_skipped", "alarm", "protection_off", "unverified", "rewound", "slow"}
)  # fmt: skip


def clean(text: str, max_chars: int = MAX_LINE) -> str:
    """One line as it may be shown: no control characters, no secrets, not too long."""
    visible = _HIDDEN.sub("", _CONTROL.sub("", text[: 4 * max_chars]))
    shown = redact(visible)
    return shown if len(shown) <= max_chars else shown[: max_chars - 3] + "..."


def read_log(run: RunDir, cursor: int | None) -> dict[str, Any]:
    """The lines after `cursor`, or the last ones. `is_cut`: there are lines before the first one."""
    path = run.out_log
    try:
        size = path.stat().st_size
        if cursor is None or not 0 <= size - cursor <= LOG_BYTES:
            data, is_cut = read_end(path, LOG_BYTES)
            begin = size - len(data)
            skipped = data.find(b"\n") + 1 if is_cut else 0
            data, begin = data[skipped:], begin + skipped
        else:
            data, is_cut, begin = read_part(path, cursor, LOG_BYTES), False, cursor
    except OSError:
        return {"cursor": 0, "lines": [], "is_cut": False, "is_new": True}
    end = data.rfind(b"\n") + 1 or (len(data) if len(data) >= LOG_BYTES else 0)
    lines = data[:end].decode("utf-8", "replace").split("\n")
    return {
        "cursor": begin + end,
        "lines": [clean(line) for line in lines if line],
        "is_cut": is_cut,
        "is_new": cursor is None or begin != cursor,
    }


def search_log(run: RunDir, word: str) -> dict[str, Any]:
    """The newest lines that hold `word`, whatever its case, in the last part of the log."""
    try:
        data, is_cut = read_end(run.out_log, SEARCHED_BYTES)
    except OSError:
        data, is_cut = b"", False
    wanted = word.lower()
    lines = [line for line in data.decode("utf-8", "replace").split("\n") if wanted in line.lower()]
    shown = [clean(line) for line in lines[-MAX_MATCHES:]]
    # What was hidden must not be found either: a search could guess a secret letter by letter.
    shown = [line for line in shown if wanted in line.lower()]
    return {"lines": shown, "num_found": len(lines), "is_cut": is_cut, "searched_bytes": len(data)}


def read_events(run: RunDir, cursor: str) -> dict[str, Any]:
    """The events after `cursor`, oldest first, with the cursor for the next call."""
    paths = (run.supervisor_events, run.session_events(0))
    offsets = _offsets(cursor, len(paths))
    found: list[tuple[float, dict[str, Any]]] = []
    following = []
    for path, offset in zip(paths, offsets, strict=True):
        start = _start(path, offset)
        lines = read_lines(path, start, max_bytes=EVENT_BYTES)
        following.append(lines.next_offset)
        events = map(EventRecord.from_json, lines.records)
        found += [(event.at_s, _event_json(event)) for event in events if event.at_s is not None and _is_told(event)]
    found.sort(key=lambda pair: pair[0])
    return {
        "cursor": "-".join(map(str, following)),
        "is_new": offsets == (0,) * len(paths),
        "events": [event for _, event in found[-MAX_EVENTS:]],
    }


def _start(path: Path, offset: int) -> int:
    """Where to read: at the cursor, but never so much that only the beginning would be read."""
    try:
        size = os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return offset
    return max(offset, size - EVENT_BYTES) if offset <= size else 0


def _offsets(cursor: str, count: int) -> tuple[int, ...]:
    words: Sequence[str] = cursor.split("-")
    if len(words) != count or not all(re.fullmatch(r"\d{1,15}", word) for word in words):
        return (0,) * count
    return tuple(map(int, words))


def _is_told(event: EventRecord) -> bool:
    return event.event in TOLD and bool(event.text)


def _event_json(event: EventRecord) -> dict[str, Any]:
    first, _, more = (event.text or "").partition("\n")
    return {
        "at_s": event.at_s,
        "event": event.event,
        "text": clean(first, 400),
        "more": [clean(line, 400) for line in more.split("\n")[:20] if line.strip()],
        "is_warning": event.event in WARNINGS,
    }


def read_incidents(run: RunDir) -> list[dict[str, Any]]:
    """What was gathered when the last attempt was found stuck."""
    found = []
    attempt = run.last_attempt()
    for path in attempt.list_incidents()[-MAX_INCIDENTS:] if attempt else ():
        try:
            text = read_text(path, MAX_INCIDENT_BYTES)
        except OSError:
            continue
        found.append({"name": clean(path.name, 80), "lines": [clean(line, 400) for line in text.splitlines()]})
    return found

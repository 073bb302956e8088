"""The supervisor's messages for people, as a viewer reads them; leaves out what the output above already says."""

from __future__ import annotations

from jackline.cli.text.clock import clock
from jackline.cli.text.paint import Tone
from jackline.cli.view.live_line import Line
from jackline.rundir.jsonl import read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.records.event import EventRecord

OLD_AFTER_S = 5.0
_REMEMBERED_BYTES = 8192
_TONES: dict[str | None, Tone] = {
    "died": "bad",
    "stuck": "bad",
    "memory": "warn",
    "mirror_failed": "warn",
    "not_mirrored": "warn",
    "finished": "good",
}


class Notes:
    """The texts in events-supervisor.jsonl for the attempts that a viewer shows."""

    def __init__(self, run: RunDir, attempt: int, *, from_start: bool) -> None:
        self._path = run.supervisor_events
        self._attempt = attempt
        self._offset = 0
        self._has_begun = False
        if not from_start:
            self._has_begun = True
            while (lines := read_lines(self._path, self._offset)).next_offset > self._offset:
                self._offset = lines.next_offset

    def read(self, now_s: float) -> list[Line]:
        """New texts. An old one is printed with the time when it was written."""
        lines = read_lines(self._path, self._offset)
        self._offset = lines.next_offset
        events = map(EventRecord.from_json, lines.records)
        told = [event for event in events if self._belongs(event) and event.text]
        return [Line(_dated(event.text or "", event.at_s, now_s), tone_of(event)) for event in told]

    def _belongs(self, event: EventRecord) -> bool:
        if self._has_begun:
            return True
        # The user has just asked for the first start, so it is not reported.
        self._has_begun = event.event == "started" and event.attempt == self._attempt
        return False


def tone_of(event: EventRecord) -> Tone:
    """Red is dead or stuck, yellow wants a look, green is done."""
    if event.event in _TONES:
        return _TONES[event.event]
    text = event.text or ""
    return "bad" if text.startswith("STUCK") else "warn" if text.startswith("SUSPECT") else "note"


class Shown:
    """The last bytes that the program itself has written to this screen."""

    def __init__(self) -> None:
        self._tail = b""

    def add(self, data: bytes) -> None:
        self._tail = (self._tail + data[-_REMEMBERED_BYTES:])[-_REMEMBERED_BYTES:]

    def without_repetition(self, text: str) -> str:
        """The text without the parts of an error (error:, detail, hint:) that the program has printed above."""
        above = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines()]

        def is_above(line: str) -> bool:
            # A long line is cut off when it is quoted.
            return any(known.startswith(line.strip()) for known in above)

        first, *rest = text.split("\n")
        if not first.startswith("error: ") or not is_above(first):
            return text
        new = [line.strip() for line in rest if not is_above(line)]
        return "\n".join(["; ".join(["exited because of the error above", *new[:1]]), *new[1:]])


def _dated(text: str, at_s: float | None, now_s: float) -> str:
    if at_s is None or now_s - at_s < OLD_AFTER_S:
        return text
    return f"{clock(at_s, now_s)} {text}"

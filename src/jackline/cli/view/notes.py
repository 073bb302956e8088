"""The permanent lines of a live view beside those of the command itself: messages of the supervisor, an evaluation, a
minute, advice.

Owns what is said once and when, and leaves out what the output above already says; a view of one hour gets at most
120 lines of Commentary. Does not own: the line that is redrawn in place (live_line.py).
"""

from __future__ import annotations

from jackline.cli.text.clock import clock
from jackline.cli.text.paint import Tone
from jackline.cli.text.safety import safe_text
from jackline.cli.view.live_line import Line, evaluation, live_line
from jackline.rundir.jsonl import end_of, read_last, read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.records.event import EventRecord
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.records.start import read_start
from jackline.rundir.records.supervisor import SupervisorRecord

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
        self._offset = 0 if from_start else end_of(self._path)
        is_adopted = bool(read_start(run.attempt(attempt)).is_adopted)  # its start is no event
        self._has_begun = not from_start or is_adopted

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


MINUTE_S = 60.0
# At most 120 lines an hour, whatever the loop logs: the first of them at once, later ones as they are earned.
_AT_ONCE, _AN_HOUR = 20.0, 100.0
_SHOWN = 4
_LOOKED_THROUGH = 200
_MIRROR = "its checkpoints are on this machine only; --mirror PATH|URL keeps a copy elsewhere"


class Commentary:
    """Of one viewer. `from_start`: the run began with this view, so whatever it has is new."""

    def __init__(self, run: RunDir, now_s: float, *, from_start: bool) -> None:
        self._run = run
        self._said_s = now_s
        self._counted: float | None = None
        self._moved_s = now_s
        self._evaluation: dict[str, float] | None = {} if from_start else None
        self._allowed = _AT_ONCE
        self._allowed_s = now_s
        self._waits_for_mirror = from_start

    @property
    def moved_s(self) -> float:
        """When the count last changed."""
        return self._moved_s

    def note_line(self, now_s: float) -> None:
        """The command itself, or the supervisor, has printed a line."""
        self._said_s = now_s

    def read(
        self, state: SupervisorRecord, session: SessionRecord, now_s: float, *, wall_s: float, columns: int
    ) -> list[Line]:
        """What is to be said now; `now_s` is a monotonic clock, `wall_s` is time.time()."""
        self._follow(state, session, now_s)
        self._allowed = min(_AT_ONCE, self._allowed + (now_s - self._allowed_s) * _AN_HOUR / 3600)
        self._allowed_s = now_s
        if self._allowed < 1:
            return []
        lines = [Line(text, "note") for text in self._advice(session)]
        if text := self._new_evaluation(session):
            lines.append(Line(text, "good"))
        elif now_s - self._said_s >= MINUTE_S and self._counted is not None:
            stamp = clock(wall_s, wall_s).removesuffix(" UTC")
            room = columns - len(stamp) - 2
            line = live_line(state, session, wall_s, columns=room, still_s=now_s - self._moved_s)
            lines.append(Line(f"{stamp}  {line.text}", line.tone))
        if lines:
            self._said_s = now_s
            self._allowed -= len(lines)
        return lines

    def _follow(self, state: SupervisorRecord, session: SessionRecord, now_s: float) -> None:
        is_inside = session.done is not None and session.attempt in (None, state.attempt)
        counted = session.done if is_inside else state.progress.done
        if counted != self._counted:
            self._counted, self._moved_s = counted, now_s

    def _advice(self, session: SessionRecord) -> list[str]:
        """Once, with the first checkpoint: a disk survives a power cut, but not the loss of the machine."""
        if not self._waits_for_mirror or session.last_checkpoint.at_s is None:
            return []
        self._waits_for_mirror = False
        return [_MIRROR] if session.loss_bounds.machine_s is None else []

    def _new_evaluation(self, session: SessionRecord) -> str:
        found = {} if self._run.config_file.exists() else evaluation(session.metrics)  # our trainer tells its own
        before, self._evaluation = self._evaluation, found
        changed = [name for name in found if before is not None and found[name] != before.get(name)]
        if not changed:
            return ""
        shown = ", ".join(f"{safe_text(name, 40)} {found[name]:.4g}" for name in changed[:_SHOWN])
        best = session.best
        is_best = best.name in changed and best.value == found.get(best.name or "")
        return f"evaluation{self._at_step(changed[0])}: {shown}" + (" (best so far)" if is_best else "")

    def _at_step(self, name: str) -> str:
        """The step at which it was logged; the session's own step has moved on since."""
        for record in reversed(read_last(self._run.metrics(), _LOOKED_THROUGH)):
            if name in record and isinstance(record.get("step"), int):
                return f" at step {record['step']:,}"
        return ""

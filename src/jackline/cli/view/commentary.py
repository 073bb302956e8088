"""The permanent lines of a live view beside those of the command itself: an evaluation, a minute, advice.

Owns what is said once and when; a view of one hour gets at most 120 of these lines. Does not own: the line that is
redrawn in place (live_line.py), or the supervisor's own messages (notes.py).
"""

from __future__ import annotations

from jackline.cli.text.clock import clock
from jackline.cli.text.safety import safe_text
from jackline.cli.view.live_line import Line, evaluation, live_line
from jackline.rundir.jsonl import read_last
from jackline.rundir.layout import RunDir
from jackline.rundir.records.session import SessionRecord
from jackline.rundir.records.supervisor import SupervisorRecord

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

"""How far earlier attempts of a run have come, by its records; their checkpoints may be gone nevertheless."""

from __future__ import annotations

from jackline.immutable import immutable
from jackline.rundir.jsonl import read_lines
from jackline.rundir.layout import RunDir
from jackline.rundir.records.event import EventRecord
from jackline.rundir.records.fields import integer
from jackline.rundir.records.session import read_session

_COMMITTED = "checkpoint_committed"


@immutable
class Recorded:
    """`step`: the last step that a session reported. `saved_step`: of the newest checkpoint that it acknowledged."""

    step: int = 0
    saved_step: int = 0


def read_recorded(run: RunDir) -> Recorded:
    """Reads the session's last state and all its events: an attempt that failed early replaces the state."""
    session = read_session(run)
    saved = [session.last_checkpoint.step or 0]
    for line in read_lines(run.session_events()).records:
        event = EventRecord.from_json(line)
        if event.event == _COMMITTED:
            saved.append(integer(event.facts.get("step")) or 0)
    return Recorded(max(session.step or 0, *saved), max(saved))

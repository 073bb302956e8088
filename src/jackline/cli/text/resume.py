"""What the next attempt of an ended run would resume from, for `status`. Reads; changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jackline.immutable import immutable
from jackline.rundir.access.trust import judge
from jackline.rundir.layout import RunDir
from jackline.rundir.records.exit import read_exit
from jackline.rundir.records.rescue import loading_command, newest_rescue
from jackline.rundir.run_file import RunFile
from jackline.supervisor.foreign.choice import Choice, passed_over_words, refusal, source_words
from jackline.supervisor.foreign.seen import CheckpointsSeen, own_newest
from jackline.supervisor.options import SuperviseOptions
from jackline.units import format_duration

_PASSED_OVER_SHOWN = 3


@immutable
class NextStart:
    """`lines` are for people; `checkpoint` is None for a start from scratch, and when the user must decide."""

    lines: tuple[str, ...]
    checkpoint: str | None = None
    written_at_s: float | None = None
    is_refused: bool = False
    is_anew: bool = False  # nothing is known that it could continue from
    hint: str = ""  # what to type, if it is not `jackline resume RUN`

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint,
            "written_at_s": self.written_at_s,
            "is_refused": self.is_refused,
            "text": "\n".join(self.lines),
        }


def next_start(run: RunDir, contents: RunFile, now_s: float) -> NextStart:
    """What `jackline resume` would choose now."""
    last = run.last_attempt()
    left = read_exit(last).upload_left if last is not None else None
    if left is not None:
        return NextStart((f"only uploads what the mirror lacks: {left}",))
    options = SuperviseOptions.from_json(contents.options)
    if options.checkpoints is None:
        return _of_session(run, now_s)
    if not judge(run).is_ours:  # its pattern may lead anywhere on this disk
        return NextStart(("its checkpoints are not looked for: the run was not made here by you",), is_refused=True)
    cwd = Path(contents.cwd)
    if not cwd.is_dir():
        return NextStart((f"it ran in {contents.cwd}, which is not here",), is_refused=True)
    seen = CheckpointsSeen(run, options.checkpoints, cwd=cwd, since_s=contents.created_at_s)
    return _of_choice(run, seen.survey(), options.checkpoints, now_s)


def _of_choice(run: RunDir, choice: Choice, pattern: str, now_s: float) -> NextStart:
    if choice.is_refused:
        error = refusal(run.name, choice)
        return NextStart((error.message, *error.detail), is_refused=True, hint=error.hint or "")
    if choice.chosen is None:
        text = f"from the beginning: this run has no checkpoint that matches {pattern} yet"
        return NextStart((text,), is_anew=True)
    lines = [f"resumes from {source_words(choice.chosen, now_s)}"]
    lines += [passed_over_words(candidate) for candidate in choice.passed_over[:_PASSED_OVER_SHOWN]]
    return NextStart(tuple(lines), str(choice.chosen.path), choice.chosen.order_ns / 1e9)


def _of_session(run: RunDir, now_s: float) -> NextStart:
    own = own_newest(run)
    if own is not None:
        at_s = Path(own).stat().st_mtime
        return NextStart((f"resumes from {own}, saved {format_duration(max(0.0, now_s - at_s))} ago",), own, at_s)
    if run.session_files():
        return NextStart(("from the beginning: it has no checkpoint yet",), is_anew=True)
    rescued = newest_rescue(reversed(run.list_attempts()))
    if rescued is None:
        return NextStart(("the same command again; Jackline knows no checkpoints of it",), is_anew=True)
    state = "the rescued state" + (f" of step {rescued.step}" if rescued.step is not None else "")
    text = f"the same command again, which does not load {state} by itself"
    load = f"`{loading_command(run.name)}` prints the lines that load {state}"
    return NextStart((text,), is_anew=True, hint=f"{load}; `jackline resume {run.name}` starts it again")

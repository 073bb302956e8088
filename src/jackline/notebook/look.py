"""Looks at runs from a cell: `watch` while one runs, `why` at any time, `report` as a page and a file.

Owns what a stopped cell means (nothing, for the run) and when a cell fails (its run died). The words are those of
`jackline status` and `why`.

A cell shows one card (notebook/card.py) that is replaced as the run continues: a new line for every step would make
the page unusable after an hour.
"""

from __future__ import annotations

import html
import os
import time
from dataclasses import dataclass
from pathlib import Path

from jackline.cli.commands.watch import needs_supervisor, refuse_what_cannot_be_watched, take_over_gently
from jackline.cli.view.run_view import LIVE, RunView, read_view
from jackline.errors import JacklineError
from jackline.notebook.card import Card, card_html, card_text, read_charts
from jackline.notebook.command import call, say, without_traceback
from jackline.rundir.find import find_run, runs_folder
from jackline.rundir.layout import RunDir
from jackline.rundir.status import read_status
from jackline.session.home import is_notebook

LOOK_EVERY_S = 0.25
END_PATIENCE_S = 10.0
CHARTS_EVERY_S = 5.0
DRAW_EVERY_S = 1.5  # so that updates are at most 2 s apart


@dataclass(frozen=True)
class Run:
    """A run that was started from a cell. It runs independently; this object only knows its folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def state(self) -> str:
        """alive, unwatched, stopped, dead, finished, elsewhere or empty."""
        return read_status(RunDir(self.path)).state

    def watch(self) -> None:
        watch(self)

    def why(self) -> None:
        why(self)

    @without_traceback
    def status(self) -> None:
        call(["status", str(self.path)])

    @without_traceback
    def stop(self) -> None:
        """Save and stop. Running the cell that started it again resumes it."""
        call(["stop", str(self.path)])


Which = Run | str | os.PathLike[str] | None


@without_traceback
def why(run: Which = None) -> None:
    """What it is doing, by file and line, or why it ended. Without `run`: the only live one, else the newest."""
    call(["why", str(find(run).path)])


@without_traceback
def watch(run: Which = None) -> None:
    """Show a run until it has ended. Stopping the cell or restarting the kernel leaves the run alive.

    Returns when the run finished or was stopped, or when the cell was stopped; raises when the run failed.
    """
    from jackline.cli.commands.watch import watch as watch_in_terminal

    found = find(run)
    if not is_notebook():
        watch_in_terminal(found)
        wait_for_the_last_line(found)
        judge(found, read_view(found, now_s=time.time()))
        return
    status = read_status(found)
    refuse_what_cannot_be_watched(found, status)
    if status.state in LIVE:
        say(f"watching run '{found.name}'; stopping this cell or restarting the kernel does not stop it")
    try:
        judge(found, follow(found))
    except KeyboardInterrupt:
        say(f"the cell was stopped; run '{found.name}' continues")
        say(f"run the cell again to watch it; `run.stop()` or `!jackline stop {found.name}` ends it")


def find(run: Which) -> RunDir:
    if isinstance(run, Run):
        return RunDir(run.path)
    return find_run(None if run is None else os.fspath(run), runs_folder())


def follow(run: RunDir) -> RunView:
    """Draw until the run has ended."""
    from jackline.cli.view.notes import Notes

    card, charts, charts_at_s = Card(), list[str](), 0.0
    notes = Notes(run, read_status(run).attempt, from_start=False)
    draw_at_s = 0.0
    while True:
        status = read_status(run)
        if needs_supervisor(status):
            take_over_gently(run)
            continue
        is_over = status.state not in LIVE
        if is_over or time.monotonic() >= draw_at_s:
            draw_at_s = time.monotonic() + DRAW_EVERY_S
            if is_over or time.monotonic() >= charts_at_s:
                charts, charts_at_s = read_charts(run), time.monotonic() + CHARTS_EVERY_S
            view = read_view(run, now_s=time.time())
            card.show(card_text(view), card_html(view, charts))
        for note in notes.read(time.time()):
            say(note.text)
        if is_over:
            return view
        time.sleep(LOOK_EVERY_S)


def wait_for_the_last_line(run: RunDir) -> None:
    """Wait for the supervisor, which exits a moment after its run. Returns at once if the run continues."""
    until_s = time.monotonic() + END_PATIENCE_S
    while time.monotonic() < until_s:
        status = read_status(run)
        if status.state not in LIVE or not status.supervisor_state.is_finished:
            return
        time.sleep(LOOK_EVERY_S)


def judge(run: RunDir, view: RunView) -> None:
    """Report how a run ended. A failed run fails the cell, because the cells below need its results."""
    state = view.status.state
    if state == "finished":
        say(f"run '{run.name}' has finished")
    elif state == "stopped":
        say(f"run '{run.name}' was stopped; running its cell again continues it")
    elif state not in LIVE:
        raise death(run.name, view.status.end_words, view.status.exit.text or "nobody saw how it ended")


def death(name: str, words: str, text: str) -> JacklineError:
    """The recorded explanation as an error."""
    first, *rest = text.splitlines()
    hints = [line.strip() for line in rest if line.strip().startswith("hint: ")]
    detail = tuple(line.strip() for line in rest if not line.strip().startswith("hint: "))
    more = "run.why() tells more; running its cell again resumes from the last checkpoint"
    hint = "\n".join([*(hint.removeprefix("hint: ") for hint in hints), f"hint: {more}" if hints else more])
    return JacklineError(f"run '{name}' {words}: {first}", detail=detail, hint=hint)


HEIGHT = 640


@without_traceback
def report(run: Which = None, out: str | os.PathLike[str] | None = None) -> Path:
    """Write what a run did into one HTML file and show it. Without `run`: the only live one, else the newest."""
    from jackline.review.document import to_html
    from jackline.review.report import make_report
    from jackline.review.summary import summarise

    found = find(run)
    page = to_html(make_report(summarise(found, now_s=time.time())))
    path = Path(out) if out is not None else Path(f"{found.name}-report.html")
    path.write_text(page, encoding="utf-8", errors="replace")
    if is_notebook():
        from IPython.display import display

        frame = (
            f'<iframe sandbox="" srcdoc="{html.escape(page, quote=True)}" width="100%" height="{HEIGHT}"'
            f' style="border:0" title="report of {html.escape(found.name, quote=True)}"></iframe>'
        )
        plain = f"report of run '{found.name}': {path}"
        display({"text/html": frame, "text/plain": plain}, raw=True)  # type: ignore[no-untyped-call]
    say(f"the report of run '{found.name}' is in {path}")
    return path

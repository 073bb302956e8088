"""Follows a run: the child's bytes as they come, a heartbeat while it is silent, the supervisor's messages.

A viewer only reads. It may be closed, killed or disconnected at any time without affecting the run. Owns: what is
shown when, and which exit code the user gets. Does not own: drawing (screen.py), the wording of the live
line (live_line.py), which lines stay (notes.py), or what Ctrl-C does to the run (the callback).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jackline.cli.text.clock import clock
from jackline.cli.text.safety import safe_output
from jackline.cli.view.live_line import Line, Pulse, live_line
from jackline.cli.view.notes import Commentary, Notes, Shown
from jackline.cli.view.raw_stream import RawStream
from jackline.cli.view.screen import MARK, Screen, Signals, choose_color, detect_surface, keyboard_of, may_interrupt
from jackline.errors import EXIT_FAILED
from jackline.rundir.access.trust import judge
from jackline.rundir.layout import AttemptDir, RunDir
from jackline.rundir.process_id import is_alive
from jackline.rundir.records.exit import ExitRecord, read_exit
from jackline.rundir.records.session import SessionRecord, read_session
from jackline.rundir.records.start import WaitRecord, read_start, read_wait
from jackline.rundir.records.supervisor import SupervisorRecord, read_supervisor
from jackline.rundir.status import STALE_AFTER_S
from jackline.supervisor.attempt.heartbeat import FIRST_AFTER_S, heartbeat_is_due
from jackline.supervisor.options import SuperviseOptions
from jackline.units import format_bytes, format_duration

KEYBOARD_WORDS = "waiting for keyboard input"

RAW_EVERY_S = 0.05
RAW_SILENT_EVERY_S = 0.12  # while nothing comes: a line is still shown within a quarter of a second
STATE_EVERY_S = 0.5
READ_BUDGET_S = 0.25
STATUS_AFTER_S = 1.0
STATUS_OVER_A_BAR_AFTER_S = 1.5
STATUS_EVERY_S = {"terminal": 1.0, "notebook": 1.8}
# How long to wait for a missing record of the end: the keeper writes its file a moment after the command ended.
END_PATIENCE_S = 5.0
END_SETTLES_S = 0.6
START_PATIENCE_S = 10.0


def follow(
    run: RunDir,
    *,
    attempt: int,
    from_start: bool = True,
    pass_on: Callable[[int], object] | None = None,
    on_terminate: Callable[[], object] | None = None,
    screen: Screen | None = None,
) -> int:
    """Show `run` from `attempt` on until it has ended; return its exit code.

    Detaches (128 + signal number) at SIGTERM, SIGHUP, a closed stdout, and at SIGINT that is not from a terminal.
    At a terminal SIGINT is handed to `pass_on` and following continues, unless that returns False; SIGUSR1 always is.
    With `on_terminate`, SIGTERM calls that and following continues.
    """
    viewer = Viewer(run, run.attempt(attempt), screen or open_screen(), from_start=from_start)
    with Signals() as signals:
        while True:
            code = viewer.step(time.monotonic())
            if code is None:
                code = _mind_signals(signals, viewer, pass_on, on_terminate)
            if code is not None:
                viewer.close()
                return code
            time.sleep(viewer.pause_s(time.monotonic()))


def open_screen(*, is_quiet: bool = False) -> Screen:
    surface = detect_surface(os.environ)
    return Screen(surface, use_color=choose_color(os.environ, surface), is_quiet=is_quiet)


def _mind_signals(
    signals: Signals,
    viewer: Viewer,
    pass_on: Callable[[int], object] | None,
    on_terminate: Callable[[], object] | None,
) -> int | None:
    """The exit code when it is time to detach."""
    name = viewer.run.name
    goes_on = f"the run continues; `jackline watch {name}` shows it again, `jackline stop {name}` ends it"
    if viewer.screen.is_reader_gone:
        viewer.screen.say(f"nobody reads our output any more: {goes_on}")
        return 128 + 13
    if signals.hangup:
        return 128 + 1
    if signals.terminate and on_terminate is not None:
        signals.terminate = False
        on_terminate()
    if signals.terminate:
        viewer.screen.say(f"this viewer was told to end (SIGTERM): {goes_on}")
        return 128 + 15
    if signals.warning and pass_on is not None:
        pass_on(signal.SIGUSR1)
    signals.warning = False
    while signals.interrupts > 0:
        signals.interrupts -= 1
        if pass_on is None or not may_interrupt(viewer.screen.surface):
            viewer.screen.say(f"detached: {goes_on}")
            return 128 + 2
        if pass_on(signal.SIGINT) is False:
            viewer.screen.say(f"there is no supervisor to hand Ctrl-C to; detached: {goes_on}")
            return 128 + 2
    return None


class Viewer:
    """Live state of one viewer. `step` is called about ten times a second, twice as often while output comes."""

    def __init__(self, run: RunDir, attempt: AttemptDir, screen: Screen, *, from_start: bool) -> None:
        self.run = run
        self.screen = screen
        self._attempt = attempt
        self._streams = _open_streams(attempt, from_start=from_start)
        self._notes = Notes(run, attempt.number, from_start=from_start)
        self._shown = Shown()
        self._is_ours = judge(run).is_ours
        self._keyboard = keyboard_of(attempt)
        self._is_typed_to = False
        self._state = SupervisorRecord()
        self._session = SessionRecord()
        self._files: tuple[int | None, ...] = ()
        self._options = SuperviseOptions()
        self._next_state_s = 0.0
        now_s = time.monotonic()
        self._started_s = now_s
        self._last_bytes_s = now_s
        self._spoken_silent_s: float | None = None
        self._num_folded = 0
        self._next_status_s = now_s + STATUS_AFTER_S
        self._alone_since_s: float | None = None
        self._last_words = ""
        is_first = from_start and attempt.number == 1
        self._commentary = Commentary(run, now_s, from_start=is_first)
        self._line: tuple[float, int, Line] = (float("-inf"), 0, Line("", ""))
        self._pulse = Pulse()

    def step(self, now_s: float) -> int | None:
        """Update everything once; return the exit code once the run has ended."""
        # Once it has ended, read the state at once instead of at the next interval.
        is_state_new = now_s >= self._next_state_s or self._attempt.exit_file.exists()
        if is_state_new:
            self._next_state_s = now_s + STATE_EVERY_S
            self._read_state()
            self._is_typed_to = self._keyboard is not None and self._attempt.keyboard.exists()
        # Check for the end before reading the last bytes; otherwise bytes written in between would be missed.
        code = self._final_code(now_s) if is_state_new else None
        is_caught_up = self._show_output(now_s)
        if self._keyboard is not None and self._is_typed_to:
            self._keyboard.pass_on()
        if is_state_new or code is not None:
            if code is not None and is_caught_up:
                self._say_folded()
            self._say_notes(now_s)
            if is_caught_up and code is None:
                self._comment(now_s)
            if is_caught_up:
                self._move_on()
        if code is not None and is_caught_up:
            return code
        if is_caught_up:
            self._give_sign_of_life(now_s)
        return None

    def pause_s(self, now_s: float) -> float:
        return RAW_EVERY_S if now_s - self._last_bytes_s < 1.0 or self._is_typed_to else RAW_SILENT_EVERY_S

    def close(self) -> None:
        for stream in self._streams:
            rest = stream.settle()
            if rest:
                self.screen.show(rest if self._is_ours else _harmless(rest), is_err=stream.is_err)
            stream.close()
        self.screen.clear_status()
        if self._last_words:
            self.screen.say(self._last_words)

    # -- the child's bytes -------------------------------------------------------------------------------------------

    def _show_output(self, now_s: float) -> bool:
        """False when there is more to read at once."""
        deadline_s = now_s + READ_BUDGET_S
        for stream in self._streams:
            while data := stream.read():
                self._show(data, stream, now_s)
                if time.monotonic() > deadline_s:
                    return False
            if rest := stream.settle_if_quiet(now_s):
                self._show(rest, stream, now_s)
            self._say_skipped(stream)
            self._num_folded += stream.take_folded()
        return True

    def _show(self, data: bytes, stream: RawStream, now_s: float) -> None:
        self._say_skipped(stream)
        self.screen.show(data if self._is_ours else _harmless(data), is_err=stream.is_err)
        self._shown.add(data)
        if b"\n" in data:
            self._commentary.note_line(now_s)
        self._last_bytes_s = now_s
        self._spoken_silent_s = None
        # The status line is updated at once where possible; over a bar it waits for silence.
        self._next_status_s = max(now_s, self._started_s + STATUS_AFTER_S)

    def _say_skipped(self, stream: RawStream) -> None:
        if stream.skipped_bytes:
            size, stream.skipped_bytes = format_bytes(stream.skipped_bytes), 0
            self.screen.say(
                f"{size} of output are not shown here: this viewer came late. All of it: {self.run.out_log}"
            )

    def _say_folded(self) -> None:
        count, self._num_folded = self._num_folded, 0
        if count:
            noun = "1 line" if count == 1 else f"{count} lines"
            self.screen.say(f"left out here: {noun} of the launcher about failed ranks ({self.run.out_log})")

    def _move_on(self) -> None:
        """Continue with the next attempt, once everything of this one was shown."""
        number = self._state.attempt
        if number is not None and number > self._attempt.number and self._attempt.exit_file.exists():
            self._say_folded()
            for stream in self._streams:
                stream.close()
            self._attempt = self.run.attempt(self._attempt.number + 1)
            self._streams = _open_streams(self._attempt, from_start=True)
            self._keyboard = keyboard_of(self._attempt)

    # -- the supervisor's state --------------------------------------------------------------------------------------

    def _read_state(self) -> None:
        files = tuple(_written_at(path) for path in (self.run.supervisor_file, self.run.session_file()))
        if files == self._files:
            return
        self._files = files
        state = read_supervisor(self.run)
        # A state left by an earlier attempt of the same run says nothing about this one.
        if state.is_there and (state.attempt is None or state.attempt >= self._attempt.number):
            self._state = state
            self._options = SuperviseOptions.from_json(state.options)
        self._session = read_session(self.run)

    def _say_notes(self, now_s: float) -> None:
        for note in self._notes.read(time.time()):
            self.screen.say(self._shown.without_repetition(note.text), note.tone)
            self._commentary.note_line(now_s)
            self._spoken_silent_s = now_s - self._last_bytes_s

    def _comment(self, now_s: float) -> None:
        """Lines that stay, on a screen whose live line does not; a pipe has its heartbeat."""
        wall_s, columns = time.time(), self.screen.columns - len(MARK) - 1
        lines = self._commentary.read(self._state, self._session, now_s, wall_s=wall_s, columns=columns)
        for line in lines if self.screen.surface != "plain" else ():
            self.screen.say(line.text, line.tone)

    def _final_code(self, now_s: float) -> int | None:
        """The exit code, if the run has ended and will not be restarted."""
        if self._state.is_finished and self._state.attempt == self._attempt.number:
            code = _exit_code(read_exit(self._attempt))
            return EXIT_FAILED if code is None else code
        if self._is_anybody_there(now_s):
            self._alone_since_s = None
            return None
        if self._alone_since_s is None:
            self._alone_since_s = now_s
        return self._code_without_supervisor(now_s - self._alone_since_s)

    def _is_anybody_there(self, now_s: float) -> bool:
        supervisor = self._state.supervisor
        is_starting = supervisor is None and now_s - self._started_s < START_PATIENCE_S
        if is_alive(supervisor) or (is_starting and not self._attempt.exit_file.exists()):
            return True
        return is_alive(read_start(self._attempt).child)

    def _code_without_supervisor(self, alone_s: float) -> int | None:
        """The exit code from the supervisor's or the keeper's file; after a while, a failure if there is neither."""
        name = self.run.name
        if alone_s < END_SETTLES_S:
            return None
        code = _exit_code(read_exit(self._attempt))
        if code is not None:
            return code
        code = _exit_code(read_wait(self._attempt))
        if code is not None:
            self._last_words = f"it ended with exit code {code}, unwatched; `jackline watch {name}` examines its end"
            return code
        if alone_s < END_PATIENCE_S:
            return None
        self._last_words = f"supervisor and training are gone, nobody saw how; `jackline why {name}` looks into it"
        return EXIT_FAILED

    # -- signs of life -----------------------------------------------------------------------------------------------

    def _give_sign_of_life(self, now_s: float) -> None:
        silent_s = now_s - self._last_bytes_s
        if self.screen.surface == "plain":
            first_s = self._options.quiet_after_s or FIRST_AFTER_S
            if heartbeat_is_due(silent_s, self._spoken_silent_s, first_after_s=first_s):
                self._spoken_silent_s = silent_s
                line = self._life(now_s, None)
                self.screen.say(line.text, line.tone)
            return
        if now_s < self._next_status_s or self._is_prompting():
            return
        is_bar = self.screen.is_row_open or self.screen.surface == "notebook"
        if silent_s >= (STATUS_OVER_A_BAR_AFTER_S if is_bar else 0.0):
            self._next_status_s = now_s + STATUS_EVERY_S[self.screen.surface]
            columns = self.screen.columns
            made_s, made_for, line = self._line
            if (
                now_s - made_s >= STATE_EVERY_S or columns != made_for
            ):  # a command may print a thousand lines a second
                room = columns - len(MARK) - 1
                line = self._pulse.beat(self._life(now_s, room), now_s, room)
                self._line = (now_s, columns, line)
            self.screen.set_status(line.text, line.tone)

    def _life(self, now_s: float, columns: int | None) -> Line:
        still_s = now_s - self._commentary.moved_s
        name, wall_s = self.run.name, time.time()
        return life_line(self._state, self._session, name, wall_s, columns=columns, still_s=still_s)

    def _is_prompting(self) -> bool:
        """Whether it waits for input that the user types here: a line of ours would appear in the middle of it."""
        return self._keyboard is not None and self._options.tty and self._state.now.what == KEYBOARD_WORDS


def _harmless(data: bytes) -> bytes:
    """Output of somebody else's run: lines and colours. A program of our own may also move the cursor, for bars."""
    return safe_output(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"), with_colors=True)


def life_line(
    state: SupervisorRecord,
    session: SessionRecord,
    name: str,
    now_s: float,
    *,
    columns: int | None = None,
    still_s: float = 0.0,
) -> Line:
    """The sign of life of a run: how far it is, or since when there has been no heartbeat."""
    if state.at_s is None:
        return Line("starting", "dim")
    is_watched = is_alive(state.supervisor)
    if now_s - state.at_s > STALE_AFTER_S or not is_watched:
        return Line(_stale_text(state, name, clock(state.at_s, now_s), is_supervisor_alive=is_watched), "warn")
    if state.is_restarting:
        wait_s = max(0.0, (state.restart_at_s or now_s) - now_s)
        return Line(f"attempt {state.attempt} has ended; restarting in {format_duration(wait_s)}", "warn")
    return live_line(replace(state, at_s=now_s), session, now_s, columns=columns, still_s=still_s)


def _written_at(path: Path) -> int | None:
    """When it was replaced; None where that cannot be told."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _stale_text(state: SupervisorRecord, name: str, since: str, *, is_supervisor_alive: bool) -> str:
    child = state.child
    pid = f"training pid {child.pid} is {'alive' if is_alive(child) else 'gone'}" if child else "no training is known"
    if is_supervisor_alive:
        return f"no heartbeat since {since}, {pid}; its supervisor is alive but writes nothing (a full disk?)"
    return f"no heartbeat since {since}, {pid}; `jackline watch {name}` takes it over"


def _open_streams(attempt: AttemptDir, *, from_start: bool) -> list[RawStream]:
    streams = [RawStream(attempt.raw_out, from_start=from_start)]
    # Without --split-streams this file never exists; trying to open it fails and costs nothing.
    streams.append(RawStream(attempt.raw_err, is_err=True, from_start=from_start))
    return streams


def _exit_code(found: ExitRecord | WaitRecord) -> int | None:
    """From exit.json or the keeper's wait.json; for a signal 128 + its number, as in shells."""
    if found.exit_code is not None:
        return 128 - found.exit_code if found.exit_code < 0 else found.exit_code
    return 128 + found.signal if found.signal is not None else None

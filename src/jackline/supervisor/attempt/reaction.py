"""What a polite signal will do to this command: save and end, end at once, or nothing.

Owns the words. Read from the kernel (which signals the process catches or ignores) and from the session's record.
Does not own: sending signals (stopping.py).
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from jackline.machine.proc import SignalAnswer, signal_answer
from jackline.rundir.layout import RunDir
from jackline.rundir.process_id import is_alive
from jackline.rundir.records.session import read_session
from jackline.rundir.run_file import DamagedRun, read_run_file
from jackline.supervisor.attempt.stopping import Step
from jackline.supervisor.child.process import Command
from jackline.units import format_duration

_MAX_SOURCE_BYTES = 1 << 20
_HANDLES_SIGTERM = re.compile(rb"\bSIGTERM\b")
_HANDLES_CTRL_C = re.compile(rb"except\s*\(?[^\n:]*\bKeyboardInterrupt\b|signal\.SIGINT")


def reaction(run: RunDir, attempt: int, pid: int, number: int) -> str:
    answer = signal_answer(pid, number)
    if answer in ("caught", "default") and has_rescue(run, attempt, pid) and not is_attached(run, attempt):
        own = (
            ""
            if _is_ours(run, answer, number)
            else f"; what the script does at {signal.Signals(number).name} follows"
        )
        return f"Jackline rescues the state of its last step first{own}"
    return stop_words(answer, number, is_attached=is_attached(run, attempt))


def has_rescue(run: RunDir, attempt: int, pid: int) -> bool:
    """Whether the process can be asked for its state: it has taken an optimizer step."""
    return run.attempt(attempt).rescue_door(pid).exists()


def _is_ours(run: RunDir, answer: SignalAnswer, number: int) -> bool:
    """Whether SIGTERM ends the process as if nothing handled it: a handler that rescues first is ours."""
    return number == signal.SIGTERM and (answer == "default" or not script_mentions(run, _HANDLES_SIGTERM))


def step_words(run: RunDir, command: Command, step: Step, stage: int) -> str:
    """The text of a step; with its first, polite signal what that will do. Call it before the signal is sent."""
    if stage != 1:
        return step.text
    return f"{step.text}: {reaction(run, command.attempt.number, command.child.pid, step.signal)}"


def taken_over_text(command: Command, seen_at_s: float | None) -> str:
    """What a supervisor says that has not started the command: when it was last watched, if it ever was."""
    if command.is_adopted and seen_at_s is None:
        pid, since_s = command.child.pid, time.time() - command.started_at_s
        return f"watching process {pid}, which was started without Jackline {format_duration(since_s)} ago; read only"
    gap = f" for {format_duration(time.time() - seen_at_s)}" if seen_at_s is not None else ""
    return f"a new supervisor took over; nobody watched{gap} before this line"


def is_attached(run: RunDir, attempt: int) -> bool:
    """Whether a session inside the command will hear the request."""
    session = read_session(run)
    return session.attempt == attempt and session.process is not None and is_alive(session.process)


def choose_signal(run: RunDir, attempt: int, pid: int) -> int:
    """SIGTERM, unless the script would end of it at once and its source shows that it handles Ctrl-C."""
    answer = signal_answer(pid, signal.SIGTERM)
    if answer == "caught" and has_rescue(run, attempt, pid) and _is_ours(run, answer, signal.SIGTERM):
        answer = "default"
    if is_attached(run, attempt) or answer != "default":
        return signal.SIGTERM
    handles = signal_answer(pid, signal.SIGINT) == "caught" and script_mentions(run, _HANDLES_CTRL_C)
    return signal.SIGINT if handles else signal.SIGTERM


def script_mentions(run: RunDir, words: re.Pattern[bytes]) -> bool:
    """Whether a script named in the command has these words: KeyboardInterrupt or SIGINT, for example."""
    try:
        contents = read_run_file(run)
    except DamagedRun:
        return False
    for word in contents.argv:
        if word.endswith(".py"):
            try:
                with open(Path(contents.cwd) / word, "rb") as source:
                    if words.search(source.read(_MAX_SOURCE_BYTES)):
                        return True
            except OSError:
                continue
    return False


def stop_words(answer: SignalAnswer, number: int, *, is_attached: bool) -> str:
    """What a signal will do to a command, by what it does about that signal."""
    name = signal.Signals(number).name
    if is_attached:
        return "it saves after its current step and ends"
    if answer == "caught" and number == signal.SIGINT:
        return "Python raises KeyboardInterrupt; what the script does then decides whether it saves"
    if answer == "caught":
        return f"it has its own handler for {name}, which decides whether it saves"
    if answer == "ignored":
        return f"it ignores {name}, so it is killed when the grace is over"
    if answer == "default":
        return f"it has no handler for {name}, so it ends at once and saves nothing"
    return f"how it answers {name} cannot be read here"

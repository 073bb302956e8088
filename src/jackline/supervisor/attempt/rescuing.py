"""Asks the processes of a command to rescue their state, and reports what they answer.

Owns when to ask: every so often, before a stop, when it is stuck, when host memory is nearly full. A process can be
asked after its first optimizer step; it then has a FIFO (`child/inside/rescue`). A crash needs no question: the
process rescues by itself, and its record is reported here. Does not own the saving (`checkpoint/rescue`).
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time

from jackline.immutable import immutable
from jackline.rundir.layout import AttemptDir
from jackline.rundir.process_id import read_state
from jackline.rundir.records.rescue import RescueRecord, loading_command, read_rescue, read_rescues, rescue_lines
from jackline.supervisor.attempt.stopping import Stopping
from jackline.supervisor.events import Events
from jackline.supervisor.options import SuperviseOptions

MAX_OVERHEAD = 0.005  # share of the time that periodic rescues may hold the training
PATIENCE_S = {"every": 60.0, "asked": 60.0, "stop": 5.0, "stuck": 3.0, "memory": 2.0}  # for a step to end
WRITING_S = 120.0
MAX_HOLD_S = 10.0  # before the first signal of a stop
MEMORY_BELOW_S = 10.0
MEMORY_AGAIN_S = 60.0
_MOST_PROCESSES = 64
_OF_HANGS = ("stuck", "stop", "time-limit")


@immutable
class Asked:
    """A question under way."""

    pid: int
    id: str
    cause: str
    until_s: float


def list_doors(attempt: AttemptDir) -> list[int]:
    """The processes that can be asked: those that run and have taken an optimizer step; not paused ones."""
    try:
        names = [entry.name for entry in os.scandir(attempt.stacks) if entry.name.startswith("ask.")]
    except OSError:
        return []
    pids = sorted(int(name[4:]) for name in names if name[4:].isascii() and name[4:].isdigit())
    return [pid for pid in pids if read_state(pid) not in ("", "Z", "X", "T", "t")][:_MOST_PROCESSES]


def ask_rescue(attempt: AttemptDir, pid: int, cause: str, wait_s: float, *, keep: bool = False) -> str | None:
    """Ask one process; the id of the question, or None when nobody listens there."""
    question = f"{os.getpid()}-{time.time_ns()}"
    body = {"id": question, "cause": cause, "wait_s": wait_s, "keep": keep}
    try:
        fd = os.open(attempt.rescue_door(pid), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return None
        os.write(fd, json.dumps(body).encode() + b"\n")
    except OSError:
        return None
    finally:
        os.close(fd)
    return question


def is_answer(record: RescueRecord, question: str) -> bool:
    """Whether a process has answered it. A process answers in turn and keeps its last answer only, so one to a later
    question will do: it is newer."""
    return record.id == question or _asked_ns(record.id) > _asked_ns(question) > 0


def _asked_ns(question: str) -> int:
    number = question.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def next_interval_s(every_s: float, stall_s: float) -> float:
    """As often as asked, but so seldom that the measured stall stays below half a percent of the time."""
    return max(every_s, stall_s / MAX_OVERHEAD)


class Rescuing:
    """The rescues of one attempt. `tend` is called once a second."""

    def __init__(self, attempt: AttemptDir, options: SuperviseOptions, events: Events) -> None:
        self._attempt, self._options, self._events = attempt, options, events
        self._asked: dict[int, Asked] = {}
        self._told: dict[int, float] = {}
        self._last_s: float | None = None
        self._stall_s = 0.0
        self._is_stuck = self._is_short = False
        self._were_stuck: frozenset[int] = frozenset()
        self._hold_until_s: float | None = None
        self._memory_asked_s: float | None = None

    @property
    def _memory_again_s(self) -> float:
        """A forecast that flaps about its limit is not asked again at each flap."""
        asked_s = self._memory_asked_s
        return float("-inf") if asked_s is None else asked_s + next_interval_s(MEMORY_AGAIN_S, self._stall_s)

    def tend(self, now_s: float, *, is_stuck: bool, memory_left_s: float | None) -> None:
        if not self._options.rescue:
            return
        self._read_answers(now_s)
        was_stuck, self._is_stuck = self._is_stuck, is_stuck
        if is_stuck and not was_stuck:
            self._ask("stuck", now_s)
        was_short, self._is_short = self._is_short, memory_left_s is not None and memory_left_s < MEMORY_BELOW_S
        if self._is_short and not was_short and now_s >= self._memory_again_s and self._ask("memory", now_s):
            self._memory_asked_s = now_s
        every_s = self._options.rescue_every_s
        if every_s is not None and not self._asked:
            self._last_s = now_s if self._last_s is None else self._last_s
            if now_s - self._last_s >= next_interval_s(every_s, self._stall_s) and self._ask("every", now_s):
                self._last_s = now_s

    def take_stuck(self) -> frozenset[int]:
        """The processes that have been at a rescue of a hang, or at the last one before a stop, since the last call.
        What they do then is not their own: it must not look as if they moved again."""
        now = frozenset(asked.pid for asked in self._asked.values() if asked.cause in _OF_HANGS)
        taken, self._were_stuck = now | self._were_stuck, now
        return taken

    def holds(self, stopping: Stopping, now_s: float) -> bool:
        """Whether the first signal of a stop must wait for a rescue under way. A second Ctrl-C ends the wait."""
        if not self._options.rescue or stopping.stage or stopping.presses > 1:
            return False
        if self._hold_until_s is None:
            self._hold_until_s = now_s + min(MAX_HOLD_S, stopping.grace_s / 2)
            if not self._asked:
                self._ask("time-limit" if stopping.why == "time-limit" else "stop", now_s)
        self._read_answers(now_s)
        return bool(self._asked) and now_s < self._hold_until_s

    def close(self) -> None:
        """After the end of the command: report what it rescued by itself, and remove its FIFOs."""
        self._read_answers(time.monotonic(), is_over=True)
        for path in self._attempt.stacks.glob("ask.*"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _ask(self, cause: str, now_s: float) -> bool:
        wait_s = PATIENCE_S.get(cause, PATIENCE_S["stop"])
        for pid in list_doors(self._attempt):
            question = ask_rescue(self._attempt, pid, cause, wait_s, keep=cause == "every")
            if question is not None:
                self._asked[pid] = Asked(pid, question, cause, now_s + wait_s + WRITING_S)
        return bool(self._asked)

    def _read_answers(self, now_s: float, *, is_over: bool = False) -> None:
        # Each record is read once: an answer that came between two looks would count as read and never be told.
        # Without a question the folder is read only at the end.
        known = {asked.pid: read_rescue(self._attempt, asked.pid) for asked in self._asked.values()}
        for record in read_rescues(self._attempt)[::-1] if is_over else list(known.values()):
            if record.pid is not None and self._told.get(record.pid) != record.at_s:
                self._told[record.pid] = record.at_s or 0.0
                self._tell(record)
        for asked in list(self._asked.values()):
            if is_answer(known[asked.pid], asked.id):
                del self._asked[asked.pid]
            elif is_over or now_s > asked.until_s:
                del self._asked[asked.pid]
                if not is_over:
                    why = "it does not answer; a call into C may hold Python's global lock"
                    self._events.emit("note", f"no rescue of process {asked.pid}: {why}")

    def _tell(self, record: RescueRecord) -> None:
        if not record.is_there or (record.outcome == "refused" and record.why.startswith("this is rank")):
            return  # rank 0 rescues what all ranks share
        self._stall_s = max(self._stall_s, record.stall_s or 0.0)
        lines = rescue_lines(record)
        if record.is_saved and record.cause != "every":
            lines.append(f"  load it: {loading_command(self._attempt.path.parents[1].name)}")
        facts = {"path": record.path, "step": record.step, "outcome": record.outcome, "cause": record.cause}
        self._events.emit("rescued" if record.is_saved else "note", "\n".join(lines), **facts)
